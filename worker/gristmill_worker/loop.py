"""The micro-batching loop: take -> encode -> plan -> run -> finish."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gristmill import wire
from gristmill.errors import BrokerUnavailable, ErrorCode, WireError
from gristmill.wire import Request, Result
from gristmill_worker.batching import costs
from gristmill_worker.batching.linger import drain
from gristmill_worker.batching.planner import plan
from gristmill_worker.engines.base import Engine, Shape
from gristmill_worker.settings import Settings
from gristmill_worker.sources.base import Delivery, Outcome, Source
from gristmill_worker.tasks.base import Encoded, ItemError, Task
from gristmill_worker.telemetry import Counters, logger

BACKOFF_S: Final = 0.1, 2.0
LAST_TRY_S: Final = 5.0  # for storing results after the stop signal while Redis is away


_NOT_YET: Final = Encoded(0, {}, {})


@dataclass(slots=True)
class _Job:
    """One well-formed request on its way."""

    delivery: Delivery
    request: Request
    body: dict[str, Any]
    queued_ms: float
    encode_ms: float = 0.0
    item: Encoded = _NOT_YET


class Loop:
    """Runs until ``stop`` is set, and then finishes the window that it holds."""

    def __init__(
        self,
        source: Source,
        engine: Engine,
        task: Task,
        settings: Settings,
        *,
        worker: str,
        model: str,
        stop: threading.Event,
    ) -> None:
        self._source = source
        self._engine = engine
        self._task = task
        self._settings = settings
        self._worker = worker
        self._model = model
        self._stop = stop
        self._cost = costs.formula(engine.shapes)
        self.counters = Counters()

    def run(self) -> None:
        """Take and process windows. Survives every error; only a refused login at the start is raised."""
        batch = self._settings.batch
        reached = False
        while not self._stop.is_set():
            try:
                window = drain(self._source.take, batch.max_items, batch.max_wait_ms / 1000)
                reached = True
                if window:
                    self.process(window)
            except BrokerUnavailable as error:
                if not reached and not error.retryable:
                    raise
                self._wait_for_redis(error)
            except Exception:  # noqa: BLE001 - a worker that stops answers nobody
                # Nobody knows which of the window got through: all of it is delivered again, and a request
                # that does this every time ends in the dead letters.
                logger().exception("window_failed")
                self._source.recover()

    def process(self, window: Sequence[Delivery]) -> None:
        """Score one window and store every result."""
        taken_ms = time.time() * 1000
        jobs, refused = self._read(window, taken_ms)
        self._finish(refused)
        jobs, refused = self._encode(jobs)
        self._finish(refused)
        # What was delivered before may have killed its worker: it runs alone.
        suspects = [job for job in jobs if job.delivery.deliveries > 1]
        fresh = [job for job in jobs if job.delivery.deliveries == 1]
        for group in (*([job] for job in suspects), fresh):
            for batch in plan([job.item.length for job in group], self._engine.shapes, self._cost):
                members = [group[i] for i in batch.items]
                late = [self._expired(job) for job in members if _is_late(job.request)]
                on_time = [job for job in members if not _is_late(job.request)]
                self._finish([*late, *(self._run(on_time, batch.shape) if on_time else [])])

    def _read(self, window: Sequence[Delivery], taken_ms: float) -> tuple[list[_Job], list[Outcome]]:
        jobs: list[_Job] = []
        refused: list[Outcome] = []
        for delivery in window:
            try:
                request = wire.decode_request(delivery.fields, self._settings.max_body_bytes)
                job = _Job(delivery, request, {}, max(0.0, taken_ms - delivery.enqueued_ms))
                if delivery.deliveries > self._settings.max_deliveries:
                    refused.append(self._given_up(job))
                elif _is_late(request):
                    refused.append(self._expired(job))
                else:
                    job.body = wire.decode_body(request)
                    jobs.append(job)
            except WireError as error:
                refused.append(self._malformed(delivery, error))
        return jobs, refused

    def _encode(self, jobs: list[_Job]) -> tuple[list[_Job], list[Outcome]]:
        started = time.perf_counter()
        encoded = self._task.encode([job.body for job in jobs]) if jobs else []
        encode_ms = (time.perf_counter() - started) * 1000
        good: list[_Job] = []
        refused: list[Outcome] = []
        for job, item in zip(jobs, encoded, strict=True):
            job.encode_ms = encode_ms
            if isinstance(item, ItemError):
                refused.append(self._failed(job, item.code, item.message))
            else:
                job.item = item
                good.append(job)
        return good, refused

    def _run(self, jobs: Sequence[_Job], shape: Shape) -> list[Outcome]:
        """Run one batch; where the engine fails, halve it until the request to blame stands alone."""
        items = [job.item for job in jobs]
        started = time.perf_counter()
        try:
            values = self._task.decode(self._engine.run(self._task.assemble(items, shape)), items)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises belongs to its batch
            if len(jobs) == 1:
                logger().warning("request_failed", id=jobs[0].request.id, error=str(error))
                return [self._failed(jobs[0], ErrorCode.ENGINE_ERROR, str(error))]
            middle = len(jobs) // 2
            return [*self._run(jobs[:middle], shape), *self._run(jobs[middle:], shape)]
        run_ms = (time.perf_counter() - started) * 1000
        tokens = sum(item.length for item in items)
        self.counters.add(batches=1, tokens=tokens, padded_tokens=shape[0] * shape[1])
        return [
            self._failed(job, value.code, value.message)
            if isinstance(value, ItemError)
            else self._outcome(
                job,
                Result(
                    id=job.request.id,
                    status="ok",
                    value=value,
                    model=self._model,
                    worker=self._worker,
                    tokens=job.item.length,
                    truncated=job.item.truncated,
                    timing_ms={
                        "queued": round(job.queued_ms, 3),
                        "encode": round(job.encode_ms, 3),
                        "run": round(run_ms, 3),
                    },
                    batch={"size": len(jobs), "shape": list(shape)},
                ),
            )
            for job, value in zip(jobs, values, strict=True)
        ]

    def _finish(self, outcomes: Sequence[Outcome]) -> None:
        """Store results, however long Redis is away: what ran is not thrown away."""
        if not outcomes:
            return
        give_up = None
        while True:
            try:
                finished = self._source.finish(outcomes)
                break
            except BrokerUnavailable as error:
                if self._stop.is_set():
                    give_up = give_up or time.monotonic() + LAST_TRY_S
                    if time.monotonic() > give_up:
                        raise  # the entries stay pending: another worker takes them over
                self._wait_for_redis(error, recover=False)
        failed = sum(1 for outcome in outcomes if outcome.result is None or not outcome.result.ok)
        dropped = len(outcomes) - finished
        self.counters.add(requests=finished, errors=failed, dropped=dropped)

    def _wait_for_redis(self, error: BrokerUnavailable, *, recover: bool = True) -> None:
        logger().warning("redis_unavailable", error=str(error))
        if recover:
            self._source.recover()  # a lost reply leaves entries under our name
        self._stop.wait(BACKOFF_S[1] if not error.retryable else BACKOFF_S[0])

    def _failed(self, job: _Job, code: str, message: str) -> Outcome:
        return self._outcome(job, self._error(job.request.id, "error", code, message))

    def _expired(self, job: _Job) -> Outcome:
        message = "its deadline passed before it ran"
        return self._outcome(job, self._error(job.request.id, "expired", ErrorCode.EXPIRED, message))

    def _given_up(self, job: _Job) -> Outcome:
        times = job.delivery.deliveries - 1
        message = f"given up: {times} deliveries ended without a result, it may crash the engine"
        logger().error("request_dead_lettered", id=job.request.id, deliveries=times)
        result = self._error(job.request.id, "error", ErrorCode.DEAD_LETTERED, message)
        return self._outcome(job, result, reason="max_deliveries")

    def _malformed(self, delivery: Delivery, error: WireError) -> Outcome:
        if error.request_id is None:  # nobody to answer
            logger().error("entry_dead_lettered", entry=delivery.entry_id.decode(), error=error.message)
            return Outcome(delivery, None, reason=error.message)
        result = self._error(error.request_id, "error", error.code, error.message)
        return Outcome(delivery, result)

    def _error(self, request_id: str, status: str, code: str, message: str) -> Result:
        return Result(request_id, status, error=(code, message), model=self._model, worker=self._worker)

    @staticmethod
    def _outcome(job: _Job, result: Result, *, reason: str = "") -> Outcome:
        return Outcome(job.delivery, result, job.request.reply, job.request.ttl_s, reason)


def _is_late(request: Request) -> bool:
    return request.deadline_ms is not None and time.time() * 1000 > request.deadline_ms
