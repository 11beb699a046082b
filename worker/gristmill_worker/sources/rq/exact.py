"""Jobs whose end takes more than the usual: failures, callbacks, dependents, retries, repeats, webhooks.

RQ's own code finishes them, one after the other in a thread of its own, so that neither a slow callback nor a
flood of failures holds up the jobs that just succeed.
"""

from __future__ import annotations

import inspect
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from queue import Queue as Hand
from typing import Any, Final

from redis import Redis
from rq import Queue, SimpleWorker
from rq.defaults import DEFAULT_FAILURE_TTL
from rq.exceptions import NoSuchJobError
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.results import Result as RqResult
from rq.timeouts import JobTimeoutException, TimerDeathPenalty
from rq.utils import now, utcformat

from gristmill.driver import ERRORS, Connections
from gristmill_worker.sources.rq.names import Names
from gristmill_worker.sources.rq.payload import RqDelivery
from gristmill_worker.telemetry import logger

BACKOFF_S: Final = 0.5
LAST_TRY_S: Final = 5.0  # without Redis, after the stop signal
BUSY: Final = 1000  # jobs; with so many at hand no more are taken
# RQ 3 passes the execution that ends, RQ 2 looks at the worker's.
_PASSES_EXECUTION: Final = "execution" in inspect.signature(SimpleWorker.handle_job_success).parameters


@dataclass(slots=True, eq=False)
class Ending:
    """How one job ended: with a value, or with an error. ``final``: it is not retried."""

    delivery: RqDelivery
    value: Any = None
    error: BaseException | None = None
    final: bool = False
    called: bool = field(default=False, init=False)  # its callback
    broken: Exception | None = field(default=None, init=False)  # what RQ's own code said of its record


class Exact:
    """Finishes jobs with RQ's own code; :meth:`submit` may be called from any thread."""

    def __init__(
        self,
        client: Redis,
        worker: SimpleWorker,
        names: Names,
        redis: Connections,
        ended: Callable[[str], None],
        max_deliveries: int,
    ) -> None:
        """``ended`` is told each job:execution that it is done with."""
        self._client = client
        self._worker = worker
        self._names = names
        self._redis = redis
        self._ended = ended
        self._max_deliveries = max_deliveries
        self._hand: Hand[Ending | None] = Hand()
        self._entries: set[str] = set()
        self._lock = threading.Lock()
        self._stopping_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="rq", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, endings: Iterable[Ending]) -> None:
        """Hand over; what is at hand already is not done twice."""
        for ending in endings:
            with self._lock:
                if ending.delivery.entry in self._entries:
                    continue
                self._entries.add(ending.delivery.entry)
            self._hand.put(ending)

    def is_busy(self) -> bool:
        """Say whether no more jobs are to be taken for now."""
        with self._lock:
            return len(self._entries) >= BUSY

    def stop(self) -> None:
        """Let the thread end when it has finished what it has."""
        self._stopping_at = time.monotonic()
        self._hand.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; says whether it has ended."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (ending := self._hand.get()) is not None:
            try:
                self._finish(ending)
            except Exception:  # noqa: BLE001 - of one job: it stays held, and is put back when this worker leaves
                logger().exception("job_not_finished", id=ending.delivery.job_id)
            with self._lock:
                self._entries.discard(ending.delivery.entry)
            self._ended(ending.delivery.entry)

    def _finish(self, ending: Ending) -> None:
        give_up: float | None = None
        while True:
            try:
                if self._try(ending):
                    return
            except ERRORS as error:
                logger().warning("redis_unavailable", error=str(error))
            except Exception as error:  # a record that RQ's code cannot read
                if ending.broken is not None:
                    raise
                logger().exception("job_record_unusable", id=ending.delivery.job_id)
                ending.broken = error
                continue
            if self._stopping_at is not None:
                give_up = give_up or time.monotonic() + LAST_TRY_S
                if time.monotonic() > give_up:
                    logger().error("job_not_finished", id=ending.delivery.job_id)
                    return
            time.sleep(BACKOFF_S)

    def _try(self, ending: Ending) -> bool:
        """Finish a job; says whether that is so. Raises one of ERRORS while Redis is away."""
        delivery = ending.delivery
        if not self._redis.call("HEXISTS", self._names.held, delivery.entry):
            return True  # it is another worker's by now
        if self._settle(delivery):
            return True  # an earlier try got through, and only its reply was lost
        execution = _execution(delivery, self._client, self._worker.name)
        if ending.broken is not None:
            self._bury(delivery, ending.error or ending.broken)
            self._forget(delivery, execution)
            return self._settle(delivery)
        try:
            job = Job.fetch(delivery.job_id, connection=self._client, serializer=delivery.serializer)
        except NoSuchJobError:
            job = None
        if job is not None and job.get_status(refresh=False) == JobStatus.STARTED:
            self._end(ending, job, execution)
            if self._settle(delivery):
                return True
            if job.get_status(refresh=True) == JobStatus.STARTED:
                return False
        self._forget(delivery, execution)
        return self._settle(delivery)

    def _end(self, ending: Ending, job: Job, execution: Execution) -> None:
        queue = Queue(
            self._worker.queues[0].name,
            connection=self._client,
            serializer=ending.delivery.serializer,
            death_penalty_class=TimerDeathPenalty,
        )
        job.started_at, job.ended_at = execution.created_at, now()
        self._worker.execution = execution
        more = {"execution": execution} if _PASSES_EXECUTION else {}
        if ending.error is None:
            job._result = ending.value  # noqa: SLF001 - where RQ's own code looks for it
            job._status = JobStatus.FINISHED  # noqa: SLF001
            self._call_back(ending, lambda: _on_success(job, ending.value), job.success_callback_timeout)
        if (error := ending.error) is not None:
            if ending.final:
                job.retries_left = None
            job._status = JobStatus.FAILED  # noqa: SLF001
            self._call_back(ending, lambda: _on_failure(job, error), job.failure_callback_timeout)
        # Not before the callbacks, which can end this process too; and it may be queued again at once.
        self._client.hdel(job.key, "gm_deliveries")
        if ending.error is None:
            self._worker.handle_job_success(
                job=job, queue=queue, started_job_registry=queue.started_job_registry, **more
            )
            _send_webhooks(job, JobStatus.FINISHED)
            return
        logger().info("job_failed", id=job.id, error=str(ending.error))
        self._worker.handle_job_failure(
            job=job,
            queue=queue,
            started_job_registry=queue.started_job_registry,
            exc_string=_text(ending.error),
            **more,
        )

    def _call_back(self, ending: Ending, call: Callable[[], None], timeout_s: float) -> None:
        """Call a job's callback once; where that fails, its error becomes the job's.

        That of a job which was given up is left out where it ended a worker as well.
        """
        if ending.called or ending.delivery.deliveries > self._max_deliveries + 1:
            return
        ending.called = True
        error = within(call, timeout_s)
        if error is not None:
            ending.called = ending.error is not None  # then it was the failure's callback
            ending.error = error

    def _settle(self, delivery: RqDelivery) -> bool:
        names = self._names
        return bool(self._redis.run("rq_settle", [names.held, names.started], [delivery.entry]))

    def _bury(self, delivery: RqDelivery, error: BaseException) -> None:
        """Fail a job whose record RQ's own code cannot read."""
        ends: dict[Any, Any] = {"status": JobStatus.FAILED.value, "ended_at": utcformat(now())}
        result = RqResult(delivery.job_id, RqResult.Type.FAILED, self._client, exc_string=_text(error))
        with self._client.pipeline() as pipeline:
            pipeline.hset(self._names.job_prefix + delivery.job_id, mapping=ends)
            pipeline.expire(self._names.job_prefix + delivery.job_id, DEFAULT_FAILURE_TTL)
            pipeline.zadd(self._names.failed, {delivery.job_id: int(time.time()) + DEFAULT_FAILURE_TTL})
            result.save(DEFAULT_FAILURE_TTL, pipeline=pipeline)
            pipeline.execute()

    def _forget(self, delivery: RqDelivery, execution: Execution) -> None:
        """Remove what RQ's code left of an execution whose job is finished, cancelled or deleted."""
        with self._client.pipeline() as pipeline:
            pipeline.zrem(self._names.started, delivery.entry)
            pipeline.delete(execution.key)
            pipeline.zrem(self._names.job_executions_prefix + delivery.job_id, delivery.execution)
            pipeline.srem(self._names.executions, delivery.entry)
            pipeline.hdel(self._names.job_prefix + delivery.job_id, "gm_deliveries")
            pipeline.execute()


def within(call: Callable[[], None], timeout_s: float) -> BaseException | None:
    """Run ``call`` in a thread for at most ``timeout_s`` seconds; return the error that it ended with.

    One that does not even end then, as it waits for something outside of Python, is left to itself.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it becomes the job's
            errors.append(error)

    thread = threading.Thread(target=run, name="callback", daemon=True)
    thread.start()
    thread.join(timeout_s + 1 if timeout_s > 0 else None)  # RQ's own penalty comes first, if it can
    if thread.is_alive():
        return JobTimeoutException(f"the callback took more than {timeout_s} seconds")
    return errors[0] if errors else None


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error))


def _on_success(job: Job, value: Any) -> None:
    if hasattr(job, "execute_success_callback"):  # RQ 2
        job.execute_success_callback(TimerDeathPenalty, value)
    else:
        from rq.callbacks import execute_success_callback  # noqa: PLC0415

        execute_success_callback(job, TimerDeathPenalty, value)


def _on_failure(job: Job, error: BaseException) -> None:
    info = type(error), error, error.__traceback__
    if hasattr(job, "execute_failure_callback"):
        job.execute_failure_callback(TimerDeathPenalty, *info)
    else:
        from rq.callbacks import execute_failure_callback  # noqa: PLC0415

        execute_failure_callback(job, TimerDeathPenalty, *info)


def _send_webhooks(job: Job, status: JobStatus) -> None:
    if hasattr(job, "send_webhooks"):  # RQ 3; failures' are sent by handle_job_failure
        job.send_webhooks(status)


def _execution(delivery: RqDelivery, client: Redis, worker: str) -> Execution:
    execution = Execution(delivery.execution, delivery.job_id, client)
    execution.worker_name = worker
    execution.created_at = datetime.fromtimestamp(delivery.taken_s, tz=UTC)
    return execution
