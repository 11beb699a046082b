"""One request on its way through a worker, and the verdicts on it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gristmill import wire
from gristmill.errors import ErrorCode, WireError
from gristmill.wire import Request, Result
from gristmill_worker.sources.base import Delivery, Outcome
from gristmill_worker.tasks.base import Encoded
from gristmill_worker.telemetry import logger

_NOT_YET: Final = Encoded(0, {}, {})


@dataclass(slots=True, eq=False)
class Job:
    """One well-formed request on its way."""

    delivery: Delivery
    request: Request
    queued_ms: float
    body: Mapping[str, Any]
    encode_ms: float = 0.0
    item: Encoded = _NOT_YET

    def is_late(self) -> bool:
        """Say whether its deadline has passed."""
        deadline_ms = self.request.deadline_ms
        return deadline_ms is not None and time.time() * 1000 > deadline_ms


class Judge:
    """Reads entries and words the outcomes in this worker's name."""

    def __init__(self, worker: str, model: str, *, max_deliveries: int, max_body_bytes: int) -> None:
        self._worker = worker
        self._model = model
        self._max_deliveries = max_deliveries
        self._max_body_bytes = max_body_bytes

    def read(self, window: Sequence[Delivery]) -> tuple[list[Job], list[Outcome]]:
        """Return the jobs of a window, and the outcomes of entries that are none."""
        taken_ms = time.time() * 1000
        jobs: list[Job] = []
        refused: list[Outcome] = []
        for delivery in window:
            try:
                request = wire.decode_request(delivery.fields, self._max_body_bytes)
                job = Job(delivery, request, max(0.0, taken_ms - delivery.enqueued_ms), {})
                if delivery.deliveries > self._max_deliveries:
                    refused.append(self._given_up(job))
                elif job.is_late():
                    refused.append(self.expired(job))
                else:
                    job.body = wire.decode_body(request)
                    jobs.append(job)
            except WireError as error:
                refused.append(self._malformed(delivery, error))
        return jobs, refused

    def ok(self, job: Job, value: Any, run_ms: float, batch: Mapping[str, Any]) -> Outcome:
        timing_ms = {
            "queued": round(job.queued_ms, 3),
            "encode": round(job.encode_ms, 3),
            "run": round(run_ms, 3),
        }
        result = Result(
            id=job.request.id,
            status="ok",
            value=value,
            model=self._model,
            worker=self._worker,
            tokens=job.item.length,
            truncated=job.item.truncated,
            timing_ms=timing_ms,
            batch=batch,
        )
        return self._outcome(job, result)

    def failed(self, job: Job, code: str, message: str) -> Outcome:
        return self._outcome(job, self._error(job.request.id, "error", code, message))

    def expired(self, job: Job) -> Outcome:
        message = "its deadline passed before it ran"
        return self._outcome(job, self._error(job.request.id, "expired", ErrorCode.EXPIRED, message))

    def _given_up(self, job: Job) -> Outcome:
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
    def _outcome(job: Job, result: Result, *, reason: str = "") -> Outcome:
        return Outcome(job.delivery, result, job.request.reply, job.request.ttl_s, reason)
