"""Prometheus text from the snapshots of a machine's workers and the depths of their queues."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gristmill.core import Depth
from gristmill_worker.vitals import BOUNDS, Snapshot, trouble

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_WORKER: Final = ("worker", "queue", "model")
_STAGE_CPU: Final = "_cpu_us"  # a counter of this ending is a stage's

_COUNTERS: Final = {  # counter -> its name and help; any other is shown under its own name
    "dropped": ("dropped", "Requests whose result was not needed: answered elsewhere first, or cancelled."),
    "retries": ("retries", "Attempts that failed and may pass: the request waits for the next one."),
    "deduplicated": ("deduplicated", "Requests that got the answer of an equal one in their window."),
    "cache_hits": ("cache_hits", "Requests whose answer was kept from an earlier one."),
    "cache_misses": ("cache_misses", "Requests whose answer was not kept, where any are."),
    "batches": ("batches", "Batches that the engine ran."),
    "tokens": ("tokens", "Tokens in batches, without padding."),
    "padded_tokens": ("padded_tokens", "Tokens in batches, with padding: what the engine computed."),
    "engine_us": ("engine_seconds", "Seconds in the engine; its rate is the share of time it is busy."),
}
_NOT_SHOWN: Final = {"requests", "errors"}  # gristmill_results_total has them by status
_HISTOGRAMS: Final = {
    "request_s": ("request_seconds", "From a request's arrival in the queue until its result was stored."),
    "queued_s": (
        "queued_seconds",
        "From a request's arrival in the queue until its batch started, less encoding.",
    ),
    "batch_s": ("batch_seconds", "Time of the engine for a batch."),
    "batch_requests": ("batch_requests", "Requests in a batch."),
}


def render(snapshots: Sequence[Snapshot], depths: Mapping[str, Depth]) -> bytes:
    """Return the metrics of ``snapshots`` (label ``worker``) and of the queues in ``depths``.

    A queue that a worker serves and that has no depth is one whose Redis cannot be reached now.
    """
    return generate_latest(_Families([*_workers(snapshots), *_queues(snapshots, depths)]))


@dataclass(frozen=True, slots=True)
class _Families(Collector):
    families: Sequence[Metric]

    def collect(self) -> Iterator[Metric]:
        yield from self.families


def _labels(snapshot: Snapshot) -> list[str]:
    return [snapshot["name"], snapshot["queue"], snapshot["about"].get("model", "")]


def _gauge(name: str, text: str, labels: Sequence[str]) -> Any:
    return GaugeMetricFamily(f"gristmill_{name}", text, labels=labels)


def _workers(snapshots: Sequence[Snapshot]) -> list[Metric]:
    return [*_states(snapshots), *_counters(snapshots), *_histograms(snapshots)]


def _states(snapshots: Sequence[Snapshot]) -> list[Metric]:
    info = _gauge("worker_info", "What runs it; always 1.", [*_WORKER, "host", "pid", "engine", "precision"])
    ready = _gauge("worker_ready", "1 where the engine is warm and the loop takes requests.", _WORKER)
    stalled = _gauge("worker_stalled", "1 where the loop hangs: /healthz fails.", _WORKER)
    idle = _gauge("worker_progress_age_seconds", "Since any stage of the loop last got on.", _WORKER)
    batch = _gauge("worker_batch_age_seconds", "Since the batch of now began; 0 where none runs.", _WORKER)
    started = _gauge("worker_start_time_seconds", "Unix time of its start.", _WORKER)
    memory = _gauge("worker_resident_memory_bytes", "Memory in use.", _WORKER)
    now = time.monotonic()
    for each in snapshots:
        labels, about = _labels(each), each["about"]
        info.add_metric([*labels, *(about.get(key, "") for key in ("host", "pid", "engine", "precision"))], 1)
        ready.add_metric(labels, each["ready"])
        stalled.add_metric(labels, bool(trouble(each, now)))
        idle.add_metric(labels, 0 if each["moved_at"] is None else max(now - each["moved_at"], 0))
        batch.add_metric(labels, 0 if each["batch_at"] is None else max(now - each["batch_at"], 0))
        started.add_metric(labels, each["started_s"])
        memory.add_metric(labels, each["rss_bytes"])
    return [info, ready, stalled, idle, batch, started, memory]


def _counters(snapshots: Sequence[Snapshot]) -> list[Metric]:
    results = CounterMetricFamily(
        "gristmill_results", "Requests that were settled, by status.", labels=[*_WORKER, "status"]
    )
    stages = CounterMetricFamily(
        "gristmill_stage_cpu_seconds", "CPU time of a stage's own thread.", labels=[*_WORKER, "stage"]
    )
    others: dict[str, CounterMetricFamily] = {}
    for each in snapshots:
        labels = _labels(each)
        # Zeros from the start: a rate needs a value before the first event.
        for status in ("ok", "error", "expired", "cancelled", "dead"):
            results.add_metric([*labels, status], each["results"].get(status, 0))
        for name, value in each["counters"].items():
            if name.endswith(_STAGE_CPU):
                stages.add_metric([*labels, name.removesuffix(_STAGE_CPU)], value / 1e6)
            elif name not in _NOT_SHOWN:
                shown, text = _COUNTERS.get(name, (name, f"The worker's counter {name}."))
                family = others.setdefault(
                    name, CounterMetricFamily(f"gristmill_{shown}", text, labels=_WORKER)
                )
                family.add_metric(labels, value / 1e6 if name.endswith("_us") else value)
    return [results, stages, *others.values()]


def _histograms(snapshots: Sequence[Snapshot]) -> list[Metric]:
    families: list[Metric] = []
    for key, (name, text) in _HISTOGRAMS.items():
        family = HistogramMetricFamily(f"gristmill_{name}", text, labels=_WORKER)
        bounds = [*(str(bound) for bound in BOUNDS[key]), "+Inf"]
        for each in snapshots:
            found = each["histograms"][key]
            buckets = list(zip(bounds, accumulate(found["counts"]), strict=True))
            family.add_metric(_labels(each), buckets, found["sum"])
        families.append(family)
    return families


def _queues(snapshots: Sequence[Snapshot], depths: Mapping[str, Depth]) -> list[Metric]:
    redis = _gauge("redis_up", "1 where Redis answered for the queue within the last seconds.", ["queue"])
    for queue in sorted({each["queue"] for each in snapshots} | depths.keys()):
        redis.add_metric([queue], queue in depths)
    waiting = _gauge("queue_waiting", "Requests not given to a worker yet: the lag.", ["queue"])
    pending = _gauge("queue_pending", "Requests that were given to a worker and have no result.", ["queue"])
    dead = _gauge("queue_dead_letters", "Requests given up that are kept.", ["queue"])
    oldest = _gauge("queue_oldest_seconds", "Age of the oldest request; 0 where there is none.", ["queue"])
    limit = _gauge("queue_limit", "Requests that the queue takes.", ["queue"])
    paused = _gauge("queue_paused", "1 while workers take nothing.", ["queue"])
    for queue, depth in sorted(depths.items()):
        waiting.add_metric([queue], depth.waiting)
        pending.add_metric([queue], depth.pending)
        dead.add_metric([queue], depth.dead)
        oldest.add_metric([queue], depth.oldest_s or 0)
        limit.add_metric([queue], depth.max_length)
        paused.add_metric([queue], depth.paused)
    return [redis, waiting, pending, dead, oldest, limit, paused]
