"""A queue in Redis streams, read through the consumer group ``workers`` (see WIRE.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Final

from redis import ConnectionPool, Redis
from redis.exceptions import OutOfMemoryError, ResponseError

from gristmill import keys, wire
from gristmill.driver import ERRORS, Connections, open_pool, translate
from gristmill.errors import BrokerUnavailable
from gristmill_worker import process
from gristmill_worker.sources.base import Delivery, Outcome
from gristmill_worker.sources.black_box import BlackBox
from gristmill_worker.sources.deferred import Deferred
from gristmill_worker.sources.leases import Leases
from gristmill_worker.sources.reading import Reader, pause_for
from gristmill_worker.sources.takeover import Takeover

DONE_MARK_S: Final = 60
NO_BLOCK_S: Final = 0.0005  # under Redis's millisecond: a window's first read that does not wait
STREAM_NUMBERS: Final = {priority: i for i, priority in enumerate(keys.PRIORITIES, 1)}  # as in finish.lua
FORGOTTEN_MS: Final = 3_600_000  # a consumer without entries that is idle for so long is gone


def connect(url: str) -> Redis:
    """Return a client with connections of its own; the driver repeats nothing by itself."""
    return Redis(connection_pool=open_pool(ConnectionPool, url))


class StreamSource:
    """Takes and finishes the requests of one queue under one consumer name."""

    def __init__(self, url: str, queue: str, worker: str, *, lease_s: float, result_ttl_s: int) -> None:
        self._url = url
        self._queue = keys.check_queue(queue)
        self._worker = worker
        self._result_ttl_s = result_ttl_s
        self._redis = Connections(url)
        self._streams = keys.streams(queue)
        self._reader = Reader(self._redis, queue, worker)
        self._leases = Leases(self._redis, queue, worker)
        self._takeover = Takeover(queue, worker, lease_s)
        self._deferred = Deferred()
        self._black_box = BlackBox()
        self._resumed = False  # the last window began with a deferred entry
        self._inheriting = False  # more may be under this name of what was taken over
        self._ready = False  # the groups exist

    def take(self, count: int, block_s: float) -> list[Delivery]:
        """Return one entry that was delivered before, or else up to ``count`` new ones.

        What was delivered before may have killed its worker, so it comes alone, and its delivery is counted
        only now: its neighbours in a dead worker's window keep their counts. Those of which it is known that
        they were in no native code then come together.
        """
        if block_s > 0:  # a window begins
            self._resume()
            block_s = min(block_s, max(self._deferred.wait_s(), NO_BLOCK_S))
        with self._translated():
            self._prepare()
            paused = self._reader.paused() or self._deferred.full()
            found = self._delivered_before(count, paused=paused)
            if not found and not paused:
                found = self._reader.take(count, block_s)
        self._leases.add(found)
        if paused and not found:
            pause_for(block_s)
        return found

    def take_urgent(self, count: int, *, high: bool) -> list[Delivery]:
        """See :meth:`~gristmill_worker.sources.base.Source.take_urgent`, and :meth:`take`."""
        if not self._ready:
            return []
        found: list[Delivery] = []
        with self._translated():
            paused = self._reader.paused() or self._deferred.full()
            if self._inheriting or self._takeover.is_due():
                found = self._delivered_before(count, paused=paused)
                self._inheriting = bool(found)
            if high and not found and not paused:
                found = self._reader.take_high(count)
        self._leases.add(found)
        return found

    def _delivered_before(self, count: int, *, paused: bool) -> list[Delivery]:
        found = self._leases.own(count)
        if not found and not paused and (claimed := self._takeover.claim(self._redis)).some:
            self._leases.inherit(claimed)
            found = self._leases.own(count)
        return self._reader.mark(found)

    def finish(self, outcomes: Sequence[Outcome]) -> int:
        """Run finish.lua. May be repeated after a lost reply: what was acknowledged is not done again."""
        replies = {name: i for i, name in enumerate(sorted({o.reply for o in outcomes if o.reply}), 1)}
        names = [*self._streams, keys.dead(self._queue), *(keys.reply(self._queue, name) for name in replies)]
        lists: list[list[bytes]] = [[] for _ in range(1 + len(replies))]
        rows: list[Any] = []
        for outcome in outcomes:
            stream = replies[outcome.reply] if outcome.reply else 0
            if outcome.result is None:
                names.append(keys.dead(self._queue))
                size = 0
            else:
                names.append(keys.result(self._queue, outcome.result.id))
                body = wire.encode_result(outcome.result)
                lists[stream].append(body)
                size = len(body)
            rows += [
                STREAM_NUMBERS[outcome.delivery.priority],
                outcome.delivery.entry_id,
                stream,
                self._result_ttl_s if outcome.ttl_s is None else outcome.ttl_s,
                size,
                outcome.reason,
                outcome.delivery.deliveries,
            ]
        results = [b"[" + b",".join(bodies) + b"]" for bodies in lists]
        args = [keys.GROUP, self._worker, wire.REPLY_CAP, DONE_MARK_S, len(replies), *results, *rows]
        with self._translated():
            codes: list[int] = self._redis.run("finish", names, args)
            if 0 in codes:
                self._forget(o for o, code in zip(outcomes, codes, strict=True) if code == 0)
        self._leases.drop(outcome.delivery for outcome in outcomes)
        return sum(codes)

    def _forget(self, dropped: Iterable[Outcome]) -> None:
        """If they were cancelled, nobody has to look out for them any more."""
        if ids := [outcome.result.id for outcome in dropped if outcome.result is not None]:
            self._redis.call("ZREM", keys.cancelled(self._queue), *ids)

    def release(self, deliveries: Sequence[Delivery], after_s: float = 0.0) -> None:
        """See :meth:`~gristmill_worker.sources.base.Source.release`."""
        if after_s > 0:  # meanwhile they are in flight: renewed, and nobody takes them
            self._deferred.add(deliveries, after_s)
        else:
            self._leases.drop(deliveries)
            self._leases.recover()

    def _resume(self) -> None:
        """Have a deferred entry delivered whose time has come; every second window is left to new ones."""
        due = [] if self._resumed else self._deferred.pop()
        self._resumed = bool(due)
        if due:
            self.release(due)

    def exposing(self, deliveries: Iterable[Delivery]) -> AbstractContextManager[None]:
        """See :meth:`~gristmill_worker.sources.base.Source.exposing`."""
        return self._black_box.exposing(deliveries)

    def reachable(self) -> bool:
        """See :meth:`~gristmill_worker.sources.base.Source.reachable`."""
        return self._redis.reachable()

    def recover(self) -> None:
        """See :meth:`~gristmill_worker.sources.base.Source.recover`."""
        self._leases.recover()

    def renew(self, redis: Connections) -> None:
        """Renew the lease of everything in flight; called from another thread with its own connection."""
        with self._translated():
            self._leases.renew(redis)

    def look(self, redis: Connections) -> None:
        """Find out whose entries the next ``take`` may take over; as :meth:`renew`."""
        with self._translated():
            self._takeover.look(redis)

    def beat(self, redis: Connections, fields: Mapping[str, str], ttl_s: int) -> None:
        """Write this worker's heartbeat; as :meth:`renew`."""
        names = [keys.worker(self._queue, self._worker), keys.processes(self._queue)]
        with self._translated():
            redis.run(
                "beat", names, [ttl_s, self._worker, process.own(), *chain.from_iterable(fields.items())]
            )

    def leave(self) -> None:
        """Sign off and close; entries in flight stay for others to take over."""
        names = [keys.worker(self._queue, self._worker), keys.processes(self._queue), *self._streams]
        try:
            self._redis.run("leave", names, [keys.GROUP, self._worker, FORGOTTEN_MS])
        except ERRORS:
            pass  # it expires by itself; what is still in flight is found by its process's end
        finally:
            self._redis.close()
            self._black_box.close()

    def _prepare(self) -> None:
        if self._ready:
            return
        # Nobody else's process may stand under this name when it takes its first entry.
        self._redis.call("HDEL", keys.processes(self._queue), self._worker)
        preparations: list[tuple[Any, ...]] = [("SADD", keys.QUEUES, self._queue)]
        for stream in self._streams:
            preparations += [
                ("XGROUP CREATE", stream, keys.GROUP, "0", "MKSTREAM"),
                ("XGROUP CREATECONSUMER", stream, keys.GROUP, self._worker),
            ]
        if itself := process.own():
            preparations.append(("HSET", keys.processes(self._queue), self._worker, itself))
        full = False
        for command in preparations:
            try:
                self._redis.call(*command)
            except OutOfMemoryError:
                full = True  # reading is allowed, and only results free memory: try, and prepare again later
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
        self._black_box.open()
        self._ready = not full

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ERRORS as error:
            # What an earlier read or a lost reply gave is under this name; and where another server answers
            # next, so may be what was finished on this one.
            self._leases.recover()
            if "NOGROUP" in str(error):  # Redis 6.2 puts more before an error in a script
                self._ready = False  # Redis came back without its data, or was too full for the group
                raise BrokerUnavailable(str(translate(error, self._url))) from error
            raise translate(error, self._url) from error
