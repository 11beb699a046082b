"""One request on its way through a worker, and the verdicts on it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import orjson

from gristmill import wire
from gristmill.errors import BrokerUnavailable, ErrorCode, Status, WireError
from gristmill.wire import Refusal, Request, Result
from gristmill_worker.engines.base import Array, Shape
from gristmill_worker.settings import RetrySettings
from gristmill_worker.sources.base import Delivery, Outcome
from gristmill_worker.tasks.base import Encoded
from gristmill_worker.telemetry import logger

MESSAGE_CHARS: Final = 1000
_NOT_YET: Final = Encoded(0, {}, {})


@dataclass(slots=True, eq=False)
class Job:
    """One well-formed request on its way; its ``twins`` are equal ones that get what it gets.

    ``digest`` is of its body, where answers are kept.
    """

    delivery: Delivery
    request: Request
    body: Mapping[str, Any] = field(default_factory=dict)
    encode_ms: float = 0.0
    item: Encoded = _NOT_YET
    twins: list[Job] = field(default_factory=list)
    digest: bytes = b""

    def give(self, item: Encoded) -> None:
        """Note what the job and its twins were encoded to."""
        self.item = item
        if self.twins:
            for twin in self.twins:
                twin.item, twin.encode_ms = item, self.encode_ms

    def ends_ms(self) -> float:
        """Return the earliest deadline of the job and its twins; inf if none has one."""
        if not self.twins:
            return self.request.deadline_ms or math.inf
        return min(each.request.deadline_ms or math.inf for each in everyone((self,)))

    def is_late(self) -> bool:
        """Say whether its deadline has passed."""
        deadline_ms = self.request.deadline_ms
        return deadline_ms is not None and time.time() * 1000 > deadline_ms

    def named(self) -> dict[str, str]:
        """Return what the log calls it by."""
        trace = self.request.trace
        return {"id": self.request.id} | ({"trace": trace} if trace else {})


def everyone(jobs: Iterable[Job]) -> Iterator[Job]:
    """Return jobs and their twins."""
    for job in jobs:
        yield job
        if job.twins:
            yield from job.twins


def part_late(jobs: list[Job]) -> tuple[list[Job], list[Job]]:
    """Part off those whose deadline has passed. A twin that has time left takes a late one's place."""
    late = [each for each in everyone(jobs) if each.is_late()]
    if not late:
        return jobs, late
    in_time: list[Job] = []
    for job in jobs:
        left = [each for each in everyone((job,)) if each not in late]
        if left:
            left[0].twins = left[1:]
            in_time.append(left[0])
    return in_time, late


class Answer(NamedTuple):
    """An answer that was given before; ``json`` is its value, which thus nobody can change."""

    json: bytes
    tokens: int
    truncated: bool

    @property
    def value(self) -> Any:
        return orjson.loads(self.json)


@dataclass(frozen=True, slots=True)
class BatchRun:
    """How a batch ran; ``started_ms`` is Unix time."""

    size: int
    shape: Shape
    started_ms: float
    run_ms: float


@dataclass(slots=True)
class Batch:
    """Jobs that run together; ``inputs`` are theirs, padded to ``shape``."""

    jobs: list[Job]
    shape: Shape
    inputs: dict[str, Array]


@dataclass(slots=True)
class Ran:
    """A batch with the engine's outputs, or without where the engine failed on its only job."""

    jobs: list[Job]
    run: BatchRun
    outputs: dict[str, Array] | None
    error: str = ""
    may_pass: bool = False  # the error


class Judge:
    """Reads entries and words the outcomes in this worker's name."""

    def __init__(
        self,
        worker: str,
        model: str,
        *,
        max_deliveries: int,
        max_body_bytes: int,
        retry: RetrySettings | None = None,
    ) -> None:
        self._worker = worker
        self._model = model
        self._max_deliveries = max_deliveries
        self.max_body_bytes = max_body_bytes
        self._retry = retry or RetrySettings()

    def read(self, window: Sequence[Delivery]) -> tuple[list[Job], list[Outcome]]:
        """Return the jobs of a window, and the outcomes of entries that are none."""
        jobs: list[Job] = []
        refused: list[Outcome] = []
        for delivery in window:
            request = wire.decode_request(delivery.fields, self.max_body_bytes)
            if isinstance(request, Refusal):
                refused.append(self._malformed(delivery, request))
                continue
            job = Job(delivery, request)
            if delivery.cancelled:
                refused.append(self._cancelled(job))
            elif delivery.deliveries > self._max_deliveries:
                refused.append(self._given_up(job))
            elif job.is_late():
                refused.append(self.expired(job))
            else:
                try:
                    job.body = wire.decode_body(request.body)
                    jobs.append(job)
                except WireError as error:
                    refused.append(self.failed(job, error.code, error.message))
        return jobs, refused

    def ok(self, job: Job, value: Any, batch: BatchRun) -> Outcome:
        """Return the outcome of a job whose value is ``value``."""
        queued_ms = batch.started_ms - job.delivery.enqueued_ms - job.encode_ms
        timing_ms = {"queued": round(max(queued_ms, 0.0), 3), "encode": job.encode_ms, "run": batch.run_ms}
        result = Result(
            id=job.request.id,
            status=Status.OK,
            value=value,
            model=self._model,
            worker=self._worker,
            tokens=job.item.length,
            truncated=job.item.truncated,
            timing_ms=timing_ms,
            batch={"size": batch.size, "shape": list(batch.shape)},
            attempts=job.delivery.deliveries,
        )
        return self._outcome(job, result)

    def known(self, job: Job, answer: Answer) -> Outcome:
        """Return the outcome of a job whose answer is known, and which does not run."""
        queued_ms = time.time() * 1000 - job.delivery.enqueued_ms
        result = Result(
            id=job.request.id,
            status=Status.OK,
            value=answer.value,
            model=self._model,
            worker=self._worker,
            tokens=answer.tokens,
            truncated=answer.truncated,
            timing_ms={"queued": round(max(queued_ms, 0.0), 3), "encode": 0.0, "run": 0.0},
            attempts=job.delivery.deliveries,
            cached=True,
        )
        return self._outcome(job, result)

    def failed(self, job: Job, code: str, message: str) -> Outcome:
        return self._ended(job, Status.ERROR, code, message)

    def engine_failed(self, job: Job, ran: Ran) -> Outcome:
        """Return the outcome of a job that the engine failed on for the last time."""
        attempts = job.delivery.deliveries
        times = f" ({attempts} attempts)" if ran.may_pass and attempts > 1 else ""
        return self.failed(job, ErrorCode.ENGINE_ERROR, f"{ran.error[: MESSAGE_CHARS - len(times)]}{times}")

    def retry_in_s(self, job: Job) -> float | None:
        """Return when to try a job again whose error may pass; None if it was tried often enough.

        Deliveries are what counts the attempts: Redis knows them when this process is gone.
        """
        attempts = job.delivery.deliveries
        if attempts >= min(self._retry.max_attempts, self._max_deliveries):
            return None
        backoff_s = min(self._retry.backoff_s * 2.0 ** (attempts - 1), self._retry.max_backoff_s)
        backoff_s *= random.uniform(0.5, 1.0)  # noqa: S311 - so that what failed together comes one by one
        if job.request.deadline_ms is None:
            return backoff_s
        # Who waits learns at its deadline that it is over.
        return min(backoff_s, max(job.request.deadline_ms / 1000 - time.time(), 0.0) + 0.001)

    def expired(self, job: Job) -> Outcome:
        return self._ended(job, Status.EXPIRED, ErrorCode.EXPIRED, "its deadline passed before it ran")

    def _cancelled(self, job: Job) -> Outcome:
        return self._ended(job, Status.CANCELLED, ErrorCode.CANCELLED, "it was cancelled")

    def _ended(self, job: Job, status: str, code: str, message: str) -> Outcome:
        return self._outcome(job, self._error(job.delivery, job.request.id, status, code, message))

    def not_stored(self, outcome: Outcome, error: BrokerUnavailable) -> Outcome:
        """Return the outcome in place of one whose result Redis refuses, e.g. because of its size."""
        if outcome.result is None:
            return outcome
        message = f"the result could not be stored: {error}"
        result = self._error(outcome.delivery, outcome.result.id, Status.ERROR, ErrorCode.TOO_LARGE, message)
        return replace(outcome, result=replace(result, trace=outcome.result.trace))

    def _given_up(self, job: Job) -> Outcome:
        times = job.delivery.deliveries - 1
        message = (
            f"given up: {times} deliveries ended without a result, it may crash the engine or hold it up"
        )
        logger().error("request_dead_lettered", **job.named(), deliveries=times)
        result = self._error(job.delivery, job.request.id, Status.ERROR, ErrorCode.DEAD_LETTERED, message)
        return self._outcome(job, result, reason="max_deliveries")

    def _malformed(self, delivery: Delivery, refusal: Refusal) -> Outcome:
        error = refusal.error
        if refusal.id is None:  # nobody to answer
            logger().error("entry_dead_lettered", entry=delivery.entry_id.decode(), error=error.message)
            return Outcome(delivery, None, reason=error.message)
        result = self._error(delivery, refusal.id, Status.ERROR, error.code, error.message)
        result = replace(result, trace=refusal.trace)
        return Outcome(delivery, result, refusal.reply, refusal.ttl_s)

    def _error(self, delivery: Delivery, request_id: str, status: str, code: str, message: str) -> Result:
        if len(message) > MESSAGE_CHARS:  # a message may quote its request
            message = f"{message[:MESSAGE_CHARS]}…"
        return Result(
            request_id,
            status,
            error=(code, message),
            model=self._model,
            worker=self._worker,
            attempts=delivery.deliveries,
        )

    @staticmethod
    def _outcome(job: Job, result: Result, *, reason: str = "") -> Outcome:
        if job.request.trace is not None:
            result = replace(result, trace=job.request.trace)
        return Outcome(job.delivery, result, job.request.reply, job.request.ttl_s, reason)
