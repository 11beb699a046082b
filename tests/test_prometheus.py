"""The dashboard and the alert rules on a real Prometheus that scrapes a real worker."""

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from conftest import Server, Workers, wait_until
from gristmill import Client
from gristmill.errors import BrokerUnavailable
from probes import address_of, fetch

ROOT: Final = Path(__file__).parent.parent
RULES: Final = ROOT / "configs" / "prometheus" / "gristmill-rules.yml"
BOARD: Final = ROOT / "configs" / "grafana" / "gristmill.json"
UNPACKED: Final = ROOT / ".tools" / "usr" / "bin"  # by the Makefile


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=UNPACKED)
    if found is None:
        pytest.skip(
            f"no {name} here: install Debian's package prometheus, or 'make .tools/usr/bin/prometheus'"
        )
    return found


@dataclass(frozen=True)
class Prometheus:
    address: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        words = urllib.parse.urlencode({"query": expression})
        status, body = fetch(self.address, f"/api/v1/query?{words}")
        assert status == 200, (expression, body)
        found: list[dict[str, Any]] = json.loads(body)["data"]["result"]
        return found

    def alerts(self) -> set[str]:
        """Return the names of the alerts that fire."""
        listed = json.loads(fetch(self.address, "/api/v1/alerts")[1])["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in listed if alert["state"] == "firing"}

    def rules(self) -> dict[str, str]:
        """Return the health of each rule."""
        groups = json.loads(fetch(self.address, "/api/v1/rules")[1])["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Run the shipped configuration against ``target``, with short intervals."""
    config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    rules = yaml.safe_load(RULES.read_text("utf-8"))
    for rule in rules["groups"][0]["rules"]:
        if "for" in rule:
            rule["for"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    (folder / RULES.name).write_text(yaml.safe_dump(rules), "utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        program("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or _is_ready(address))
        assert process.poll() is None, (folder / "prometheus.log").read_text("utf-8")
        yield Prometheus(address)
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(address: str) -> bool:
    try:
        return fetch(address, "/-/ready")[0] == 200
    except OSError:
        return False


@contextmanager
def load(client: Client, queue: str) -> Iterator[None]:
    """Keep the workers of ``queue`` busy."""
    done = threading.Event()

    def run() -> None:
        number = 0
        while not done.is_set():
            number += 1
            try:
                texts = [f"the mill grinds corn {number} {i}" for i in range(50)]
                client.score_many(queue, [*texts, {"text": 5}], timeout_s=2.0)
            except (BrokerUnavailable, TimeoutError):
                done.wait(0.1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def panels() -> dict[str, str]:
    """Return the dashboard's queries as Grafana sends them, by panel and letter."""
    found = {}
    for panel in json.loads(BOARD.read_text("utf-8"))["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "10s").replace("$queue", ".*")
            assert "$" not in expression
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


def names(text: str) -> set[str]:
    return set(re.findall(r"\bgristmill_\w+", text))


def test_each_query_of_the_dashboard_and_each_metric_of_the_rules_has_data_and_the_alerts_fire(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path, tmp_path: Path
) -> None:
    worker = workers.start(tiny_classifier, "--metrics", "0", url=own_redis.url)
    with (
        Client(own_redis.url, retry_s=1.0) as client,
        prometheus(tmp_path, address_of(workers.log())) as server,
        load(client, queue),
    ):
        queries = panels() | {name: name for name in names(RULES.read_text("utf-8"))}
        empty = set(queries)

        def all_have_data() -> bool:
            for name in list(empty):
                values = [float(each["value"][1]) for each in server.query(queries[name])]
                if values and all(value == value for value in values):  # noqa: PLR0124 - NaN is not
                    empty.discard(name)
            return not empty

        try:
            wait_until(all_have_data)
        except AssertionError:
            pytest.fail(f"no data: {empty}")
        [latency] = server.query(queries["Latency B"])
        assert 0 < float(latency["value"][1]) < 1800
        wait_until(lambda: set(server.rules().values()) == {"ok"})
        assert len(server.rules()) == RULES.read_text("utf-8").count("- alert:")
        assert server.alerts() == set()

        own_redis.stop(signal.SIGKILL)
        wait_until(lambda: "GristmillRedisDown" in server.alerts())
        assert "GristmillWorkerStalled" not in server.alerts()
        own_redis.start()
        wait_until(lambda: server.alerts() == set())

        worker.terminate()
        wait_until(lambda: {"GristmillNoWorker", "GristmillTargetDown"} <= server.alerts())


def test_the_alerts_fire_when_they_should_and_not_otherwise() -> None:
    command = [program("promtool"), "test", "rules", str(Path(__file__).with_name("alerts.yml"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text("utf-8")))
    assert alerts == set(re.findall(r"alertname: (\w+)", Path(command[-1]).read_text("utf-8")))


def test_the_shipped_configuration_is_what_prometheus_takes() -> None:
    command = [program("promtool"), "check", "config", str(RULES.parent / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
