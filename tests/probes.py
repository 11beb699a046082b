"""What a worker shows over HTTP, as a probe or Prometheus asks for it."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from conftest import wait_until


def fetch(address: str, path: str, method: str = "GET") -> tuple[int, bytes]:
    """Return status and body."""
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ask(address: str, path: str) -> tuple[int, Any]:
    """Return status and what the JSON says."""
    status, body = fetch(address, path)
    return status, json.loads(body)


def address_of(log: Path) -> str:
    """Return where a worker serves its metrics, as soon as its log says it."""
    found: list[str] = []

    def look() -> bool:
        events = [json.loads(line) for line in log.read_text("utf-8").splitlines() if line.startswith("{")]
        found.extend(event["address"] for event in events if event["event"] == "metrics_served")
        return bool(found)

    wait_until(look)
    return found[0]


def metrics_of(address: str) -> str:
    """Return the text of /metrics."""
    status, body = fetch(address, "/metrics")
    assert status == 200
    return body.decode()


def fetch_metrics(log: Path) -> str:
    """Return the text of /metrics of the worker that writes ``log``."""
    return metrics_of(address_of(log))


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return the samples of a page of metrics: name -> labels but worker, queue and model -> value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in {"worker", "queue", "model"}}
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found
