"""A queue of RQ jobs as a source of the micro-batching loop.

What a worker takes is held under its name (``gm:{queue}:rq:held:<worker>``) from the step in which it leaves
RQ's list to the one in which it is finished. What a dead worker held the others put back to the list's front.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Final

from gristmill.driver import ERRORS, SOCKET_TIMEOUT_S, Connections, translate
from gristmill.errors import BrokerUnavailable, GristmillError
from gristmill.rq_jobs import RefusedJobError
from gristmill.wire import Result
from gristmill_worker.sources.base import Delivery, Outcome
from gristmill_worker.sources.rq import payload
from gristmill_worker.sources.rq.exact import Ending, Exact
from gristmill_worker.sources.rq.finishing import Finisher
from gristmill_worker.sources.rq.holding import STARTED_TTL_S, Holding, times
from gristmill_worker.sources.rq.payload import FIELDS, RqDelivery
from gristmill_worker.sources.rq.registration import Registration, redirect_log
from gristmill_worker.sources.rq.upkeep import Upkeep
from gristmill_worker.telemetry import logger

PAUSE_LOOK_S: Final = 0.2


class RqSource:
    """Takes and finishes the jobs of one RQ queue as one of its workers."""

    def __init__(
        self,
        url: str,
        queue: str,
        worker: str,
        *,
        lease_s: float,
        result_ttl_s: int,
        max_deliveries: int,
        allow_pickle: bool,
        scheduler: bool,
    ) -> None:
        """Connect nothing yet; RQ's own log comes into this project's."""
        redirect_log()
        self._url = url
        self._worker = worker
        self._allow_pickle = allow_pickle
        self._redis = Connections(url)
        self._registration = Registration(url, queue, worker, result_ttl_s)
        self._names = self._registration.names
        self._holding = Holding(self._redis, self._names, worker, lease_s)
        client = self._registration.client
        self._finisher = Finisher(self._redis, client, self._names, worker, result_ttl_s)
        self._exact = Exact(
            client,
            self._registration.worker,
            self._names,
            self._redis,
            lambda entry: self._holding.drop([entry]),
            max_deliveries,
        )
        self._upkeep = Upkeep(url, queue, worker, scheduler=scheduler)
        self._windows = 0
        self._run_id = uuid.uuid4().hex[:16]
        self._ready = False

    def take(self, count: int, block_s: float) -> list[Delivery]:
        """Return one job that was delivered before, or else up to ``count`` others.

        What this worker does not run is failed on the way.
        """
        with self._translated():
            self._prepare()
            if self._exact.is_busy():
                _pause(block_s)
                return []
            if not self._holding.is_calm(min(block_s, PAUSE_LOOK_S)):
                return []
            suspended, found = self._take(count, block_s)
            if suspended:
                _pause(block_s)
            elif not found and block_s > 0:
                names = self._names
                wait_s = min(block_s, SOCKET_TIMEOUT_S / 2)
                if self._redis.call("BLMOVE", names.queue, names.popped, "LEFT", "RIGHT", f"{wait_s:.3f}"):
                    _, found = self._take(count, block_s)
        return found

    def _take(self, count: int, block_s: float) -> tuple[bool, list[Delivery]]:
        names = self._names
        taken_s = time.time()
        self._windows += 1
        keys = [names.queue, names.popped, names.held, names.started, names.suspended, names.executions]
        suspended, *rows = self._redis.run(
            "rq_take",
            keys,
            [
                count,
                "1" if block_s > 0 else "",  # else a window goes on
                self._worker,
                f"{self._run_id}{self._windows:08x}",
                *times(taken_s),
                STARTED_TTL_S,
                names.job_prefix,
                names.execution_prefix,
                names.job_executions_prefix,
                *FIELDS,
            ],
        )
        found: list[Delivery] = []
        refused: list[Ending] = []
        for job_id, execution, deliveries, *values in rows:
            try:
                name = job_id.decode()
            except UnicodeDecodeError:
                logger().error("job_id_not_text", id=repr(job_id))  # RQ has no such job: it is forgotten
                entry = job_id + b":" + execution
                self._redis.calls(("HDEL", names.held, entry), ("ZREM", names.started, entry))
                continue
            delivery, error = payload.read(
                name,
                execution.decode(),
                deliveries,
                values,
                taken_s=taken_s,
                allow_pickle=self._allow_pickle,
            )
            self._holding.add(delivery.entry, suspect=delivery.suspect)
            if error is None:
                found.append(delivery)
            else:
                final = isinstance(error, RefusedJobError)
                refused.append(Ending(delivery, error=error, final=final))
        self._exact.submit(refused)
        return bool(suspended), found

    def take_urgent(self, count: int, *, high: bool) -> list[Delivery]:  # noqa: ARG002
        """Return nothing: RQ's list has no priorities, and what a dead worker held is at its front."""
        return []

    def finish(self, outcomes: Sequence[Outcome]) -> int:
        """Finish what succeeded in one step; hand over the rest. May be repeated after a lost reply."""
        plain: list[tuple[RqDelivery, Result]] = []
        endings: list[Ending] = []
        for outcome in outcomes:
            delivery = _own(outcome.delivery)
            result = outcome.result
            if result is not None and result.ok and not delivery.exact:
                plain.append((delivery, result))
            else:
                endings.append(_ending(delivery, result, outcome.reason))
        finished = len(endings)
        if plain:
            with self._translated():
                codes = self._finisher.finish(plain)
            finished += len(codes) - codes.count(0)
            for (delivery, result), code in zip(plain, codes, strict=True):
                if code == 2:
                    endings.append(Ending(delivery, result.value))
                else:
                    self._holding.drop([delivery.entry])
        self._exact.submit(endings)
        return finished

    def release(self, deliveries: Sequence[Delivery], after_s: float = 0.0) -> None:  # noqa: ARG002
        """See :meth:`~gristmill_worker.sources.base.Source.release`; pauses are RQ's affair."""
        self._holding.give_up([_own(each).entry for each in deliveries])

    def exposing(self, deliveries: Iterable[Delivery]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Keep no note: what a dead worker held runs again job by job."""
        return nullcontext()

    def reachable(self) -> bool:
        """See :meth:`~gristmill_worker.sources.base.Source.reachable`."""
        return self._redis.reachable()

    def recover(self) -> None:
        """See :meth:`~gristmill_worker.sources.base.Source.recover`."""
        self._holding.recover()

    def renew(self, redis: Connections) -> None:
        """See :class:`~gristmill_worker.sources.base.ServedSource`."""
        with self._translated():
            self._holding.renew(redis)

    def beat(self, redis: Connections, fields: Mapping[str, str], ttl_s: int) -> None:  # noqa: ARG002
        """Give a sign of life to the other batch workers, and to RQ."""
        with self._translated():
            self._holding.sign(redis)
            self._registration.beat(self._holding.any_job())

    def look(self, redis: Connections) -> None:
        """Put back what dead workers held."""
        with self._translated():
            self._holding.look(redis)

    def leave(self) -> None:
        """Finish what is handed over, put back the rest, sign off and close."""
        self._exact.stop()
        try:
            while not self._exact.join(1.0):  # a callback may take a while
                with suppress(BrokerUnavailable):
                    self.renew(self._redis)
                    self.beat(self._redis, {}, 0)
            self._holding.leave()
            self._registration.leave()
        except ERRORS:
            pass  # the others find out
        finally:
            self._upkeep.stop()
            self._registration.close()
            self._redis.close()

    def _prepare(self) -> None:
        if not self._ready:
            self._holding.enter()
            self._registration.enter()
            self._exact.start()
            self._upkeep.start()
            self._ready = True
        self._holding.put_back()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ERRORS as error:
            self._holding.recover()  # what a lost reply brought is held under this name
            raise translate(error, self._url) from error


def _own(delivery: Delivery) -> RqDelivery:
    if not isinstance(delivery, RqDelivery):
        raise TypeError("a delivery of another source")
    return delivery


def _ending(delivery: RqDelivery, result: Result | None, reason: str) -> Ending:
    """Return the ending of a job that failed, or whose success is not a plain one."""
    if result is None:  # its ID is none for this project
        return Ending(delivery, error=RefusedJobError(reason), final=True)
    if result.ok:
        return Ending(delivery, result.value)
    try:
        result.unwrap()
    except GristmillError as error:
        return Ending(delivery, error=error, final=bool(reason))
    raise AssertionError(result.status)


def _pause(block_s: float) -> None:
    time.sleep(min(block_s, PAUSE_LOOK_S))
