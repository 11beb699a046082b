"""A queue in a Redis stream, read through the consumer group ``workers`` (see WIRE.md)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

from redis import ConnectionPool, Redis
from redis.exceptions import OutOfMemoryError, ResponseError

from gristmill import keys, wire
from gristmill.driver import ERRORS, SOCKET_TIMEOUT_S, Connections, open_pool, translate
from gristmill.errors import BrokerUnavailable
from gristmill_worker import process
from gristmill_worker.sources.base import Delivery, Outcome
from gristmill_worker.sources.takeover import Takeover

REPLY_CAP: Final = 10_000  # entries of a reply stream; clients keep fewer requests in flight
DONE_MARK_S: Final = 60
MOST_PENDING: Final = 100_000  # entries under one name
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
        self._stream = keys.requests(queue)
        self._takeover = Takeover(queue, worker, lease_s)
        self._ready = False  # the group exists
        self._recover = True  # a restarted worker may have entries under its name
        self._in_flight: set[bytes] = set()
        self._lock = threading.Lock()

    def take(self, count: int, block_s: float) -> list[Delivery]:
        """Return one entry that was delivered before, or else up to ``count`` new ones.

        What was delivered before may have killed its worker, so it comes alone, and its delivery is counted
        only now: its neighbours in a dead worker's window keep their counts.
        """
        with self._translated():
            self._prepare()
            found: list[Delivery] = []
            if self._recover:
                self._recover = False  # first: another thread may set it again meanwhile
                found = self._own()
            if not found and self._takeover.claim(self._redis):
                found = self._own()
            self._recover = self._recover or bool(found)
            if not found:
                found = self._new(count, block_s)
        with self._lock:
            self._in_flight.update(delivery.entry_id for delivery in found)
        return found

    def finish(self, outcomes: Sequence[Outcome]) -> int:
        """Run finish.lua. May be repeated after a lost reply: what was acknowledged is not done again."""
        replies = {name: i for i, name in enumerate(sorted({o.reply for o in outcomes if o.reply}), 1)}
        names = [self._stream, keys.dead(self._queue), *(keys.reply(self._queue, name) for name in replies)]
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
                outcome.delivery.entry_id,
                stream,
                self._result_ttl_s if outcome.ttl_s is None else outcome.ttl_s,
                size,
                outcome.reason,
                outcome.delivery.deliveries,
            ]
        results = [b"[" + b",".join(bodies) + b"]" for bodies in lists]
        args = [keys.GROUP, self._worker, REPLY_CAP, DONE_MARK_S, len(replies), *results, *rows]
        with self._translated():
            finished: int = sum(self._redis.run("finish", names, args))
        with self._lock:
            self._in_flight.difference_update(outcome.delivery.entry_id for outcome in outcomes)
        return finished

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """See :meth:`~gristmill_worker.sources.base.Source.release`."""
        with self._lock:
            self._in_flight.difference_update(delivery.entry_id for delivery in deliveries)
        self._recover = True

    def reachable(self) -> bool:
        """See :meth:`~gristmill_worker.sources.base.Source.reachable`."""
        try:
            return bool(self._redis.call("PING"))
        except ERRORS:
            return False

    def recover(self) -> None:
        """See :meth:`~gristmill_worker.sources.base.Source.recover`."""
        self._recover = True

    def renew(self, redis: Connections) -> None:
        """Renew the lease of everything in flight; called from another thread with its own connection."""
        with self._lock:
            held = list(self._in_flight)
        if held:
            with self._translated():
                redis.run("renew", [self._stream], [keys.GROUP, self._worker, MOST_PENDING, *held])

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
        names = [self._stream, keys.worker(self._queue, self._worker), keys.processes(self._queue)]
        try:
            self._redis.run("leave", names, [keys.GROUP, self._worker, FORGOTTEN_MS])
        except ERRORS:
            pass  # it expires by itself
        finally:
            self._redis.close()

    def _prepare(self) -> None:
        if self._ready:
            return
        # Nobody else's process may stand under this name when it takes its first entry.
        self._redis.call("HDEL", keys.processes(self._queue), self._worker)
        preparations: list[tuple[Any, ...]] = [
            ("XGROUP CREATE", self._stream, keys.GROUP, "0", "MKSTREAM"),
            ("XGROUP CREATECONSUMER", self._stream, keys.GROUP, self._worker),
            ("SADD", keys.QUEUES, self._queue),
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
        self._ready = not full

    def _own(self) -> list[Delivery]:
        """Take the oldest entry under this name that is not being worked on."""
        with self._lock:
            busy = list(self._in_flight)
        found = self._redis.run("own", [self._stream], [keys.GROUP, self._worker, *busy])
        return [_delivery((found[0], found[1]), int(found[2]))] if found else []

    def _new(self, count: int, block_s: float) -> list[Delivery]:
        block_ms = int(min(block_s, SOCKET_TIMEOUT_S / 2) * 1000)
        block = ("BLOCK", block_ms) if block_ms else ()  # BLOCK 0 would wait for ever
        group = ("GROUP", keys.GROUP, self._worker)
        reply = self._redis.call("XREADGROUP", *group, "COUNT", count, *block, "STREAMS", self._stream, ">")
        entries = reply[0][1] if reply else []
        return [_delivery(entry, 1) for entry in entries]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ERRORS as error:
            if str(error).startswith("NOGROUP"):
                self._ready = False  # Redis came back without its data, or was too full for the group
                raise BrokerUnavailable(str(translate(error, self._url))) from error
            raise translate(error, self._url) from error


def _delivery(entry: tuple[bytes, Sequence[bytes] | None], deliveries: int) -> Delivery:
    entry_id, fields = entry
    return Delivery(entry_id, wire.pairs(fields or ()), deliveries)  # no fields: the entry was deleted
