"""What one worker knows about itself: what it did, whether it gets on. Plain numbers, read as a snapshot.

Times of the process's own doings are by the monotonic clock, which all processes of a machine share: a
snapshot that was taken in one process and handed to another grows old by itself.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypedDict

from gristmill.driver import SOCKET_TIMEOUT_S
from gristmill_worker.jobs import BatchRun
from gristmill_worker.memory import resident_mb
from gristmill_worker.sources.base import Outcome
from gristmill_worker.telemetry import Counters

# Longer than a take that finds Redis away at each of its commands, or a window that takes long to encode.
STALL_S: Final = 6 * SOCKET_TIMEOUT_S
OVERTIME_S: Final = 5.0  # batch_timeout_s ends the process; a process that is there after so much more hangs
DEAD: Final = "dead"  # the status of what was given up, beside those of results

_LATENCY_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_RUN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_REQUESTS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
BOUNDS: Final[Mapping[str, Sequence[float]]] = {  # histogram -> upper bounds of its buckets but the last
    "request_s": _LATENCY_S,  # from arrival in the queue until the result was stored
    "queued_s": _LATENCY_S,  # from arrival until its batch started, less encode
    "batch_s": _RUN_S,  # of the engine, for a batch
    "batch_requests": _REQUESTS,
}


class Counts(TypedDict):
    """A histogram: how many fell into each bucket (not cumulated; the last has no bound), and their sum."""

    counts: list[int]
    sum: float


class Snapshot(TypedDict):
    """All that is shown of one worker; JSON. ``…_at`` are times of the machine's monotonic clock."""

    name: str
    queue: str
    about: dict[str, str]  # host, pid, model, engine, precision, …; less of them while it loads
    started_s: float  # Unix time
    rss_bytes: int
    counters: dict[str, int]  # as in telemetry.Counters
    results: dict[str, int]  # by status
    histograms: dict[str, Counts]  # as in BOUNDS
    ready: bool  # the engine is warm and the loop takes
    redis_up: bool  # at the loop's last try
    taken_at: float
    moved_at: float | None  # when any stage of the loop last got on; None before it runs
    batch_at: float | None  # when the engine's batch of now began
    stall_s: float  # without getting on: it hangs
    batch_timeout_s: float  # 0: a batch may take any time


class Vitals:
    """Written by the loop's threads, read by any."""

    def __init__(self, name: str, queue: str, *, max_wait_s: float, batch_timeout_s: float) -> None:
        self.counters = Counters()
        self.about: dict[str, str] = {}
        self.ready = False
        self.redis_up = False
        self._name = name
        self._queue = queue
        self._started_s = time.time()
        self._stall_s = STALL_S + max_wait_s
        self._batch_timeout_s = batch_timeout_s
        self._moved_at: float | None = None
        self._batch_at: float | None = None
        self._lock = threading.Lock()
        self._results: dict[str, int] = {}
        self._counts = {name: [0] * (len(bounds) + 1) for name, bounds in BOUNDS.items()}
        self._sums = dict.fromkeys(BOUNDS, 0.0)

    def move(self) -> None:
        """Note that the loop gets on.

        One note for all stages is enough: what one stage passes to the next is bounded, so where one hangs
        all come to a stop.
        """
        self._moved_at = time.monotonic()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Note that the engine runs the batch of the block."""
        self._batch_at = time.monotonic()
        try:
            yield
        finally:
            self._batch_at = None
            self.move()

    def ran(self, run: BatchRun) -> None:
        """Count a batch."""
        with self._lock:
            self._add("batch_s", [run.run_ms / 1000])
            self._add("batch_requests", [run.size])

    def finished(self, outcomes: Sequence[Outcome]) -> None:
        """Count outcomes that are stored now."""
        now_s = time.time()
        results = [outcome.result for outcome in outcomes if outcome.result and not outcome.reason]
        statuses = [result.status for result in results]
        timings = [result.timing_ms for result in results if result.timing_ms]
        queued = [timing["queued"] / 1000 for timing in timings if "queued" in timing]
        latencies = [now_s - outcome.delivery.enqueued_ms / 1000 for outcome in outcomes]
        with self._lock:
            self._add("request_s", latencies)
            self._add("queued_s", queued)
            for status in {*statuses}:
                name = str(status)  # of a Status too: no JSON has that as a key
                self._results[name] = self._results.get(name, 0) + statuses.count(status)
            self._results[DEAD] = self._results.get(DEAD, 0) + len(outcomes) - len(results)
        self.move()

    def snapshot(self) -> Snapshot:
        with self._lock:
            results = dict(self._results)
            histograms = {
                name: Counts(counts=list(counts), sum=self._sums[name])
                for name, counts in self._counts.items()
            }
        return Snapshot(
            name=self._name,
            queue=self._queue,
            about=dict(self.about),
            started_s=self._started_s,
            rss_bytes=int(resident_mb() * 2**20),
            counters=self.counters.snapshot(),
            results=results,
            histograms=histograms,
            ready=self.ready,
            redis_up=self.redis_up,
            taken_at=time.monotonic(),
            moved_at=self._moved_at,
            batch_at=self._batch_at,
            stall_s=self._stall_s,
            batch_timeout_s=self._batch_timeout_s,
        )

    def heartbeat(self) -> dict[str, str]:
        """Return what stands in Redis of this worker while it lives."""
        numbers = {**self.counters.snapshot(), "rss_bytes": int(resident_mb() * 2**20)}
        numbers["beat_ms"] = int(time.time() * 1000)
        return self.about | {key: str(value) for key, value in numbers.items()}

    def _add(self, name: str, values: Sequence[float]) -> None:
        bounds, counts = BOUNDS[name], self._counts[name]
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sums[name] += max(sum(values), 0.0)  # two machines' clocks may say that time went backwards


def trouble(snapshot: Snapshot, now: float) -> str:
    """Say why the worker makes no progress and has to be replaced; '' where it gets on or waits rightly.

    A Redis that is away is no such reason: the loop goes on trying, and a restart would bring nothing.
    """
    batch_at, limit_s = snapshot["batch_at"], snapshot["batch_timeout_s"]
    if batch_at is not None:
        if limit_s and now - batch_at > limit_s + OVERTIME_S:
            return (
                f"the engine has been in one batch for {now - batch_at:.0f} s (batch_timeout_s: {limit_s:g})"
            )
        if now - snapshot["taken_at"] < snapshot["stall_s"]:
            return ""
    moved_at = snapshot["moved_at"]
    if moved_at is not None and now - moved_at > snapshot["stall_s"]:
        return f"the loop has not come around for {now - moved_at:.0f} s"
    return ""


def unready(snapshot: Snapshot, now: float) -> str:
    """Say why the worker cannot serve requests now; '' where it can."""
    if not snapshot["ready"]:
        return "it loads its model, or stops"
    if not snapshot["redis_up"]:
        return "Redis could not be reached"
    return trouble(snapshot, now)
