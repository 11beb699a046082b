"""Entries that were delivered: whose they are, for how long, and to whom they come next (see WIRE.md)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from redis import Redis

from gristmill import keys
from gristmill.driver import Connections
from gristmill_worker.sources.base import Delivery
from gristmill_worker.sources.reading import delivery

RECLAIM_ENTRIES: Final = 256  # at a time


class Leases:
    """What one worker has in flight on all streams of a queue, and what nobody works on any more."""

    def __init__(self, redis: Connections, queue: str, worker: str, lease_s: float) -> None:
        self._redis = redis
        self._worker = worker
        self._lease_s = lease_s
        self._streams = dict(zip(keys.PRIORITIES, keys.streams(queue), strict=True))
        self._recover = True  # a restarted worker may have entries under its name
        self._reclaim_at = 0.0
        # By priority, as two streams may give the same entry ID.
        self._in_flight: dict[str, set[bytes]] = {priority: set() for priority in self._streams}
        self._lock = threading.Lock()

    def add(self, deliveries: Iterable[Delivery]) -> None:
        with self._lock:
            for each in deliveries:
                self._in_flight[each.priority].add(each.entry_id)

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        with self._lock:
            for each in deliveries:
                self._in_flight[each.priority].discard(each.entry_id)

    def renew(self, connection: Redis) -> None:
        """Renew the lease of everything in flight; called from another thread with its own connection."""
        for priority, stream in self._streams.items():
            with self._lock:
                held: list[Any] = sorted(self._in_flight[priority])
            if held:
                connection.xclaim(stream, keys.GROUP, self._worker, 0, held, justid=True)

    def recover(self) -> None:
        """Let the next :meth:`own` look for entries under this name that are not being worked on."""
        self._recover = True

    def own(self) -> list[Delivery]:
        """Take one entry under this name that is not being worked on; this counts as a delivery."""
        if not self._recover:
            return []
        self._recover = False  # first: another thread may set it again meanwhile
        found: list[Delivery] = []
        for priority in self._streams:
            found = found or self._oldest(priority)
        self._recover = self._recover or bool(found)
        return found

    def _oldest(self, priority: str) -> list[Delivery]:
        with self._lock:
            busy = set(self._in_flight[priority])
        stream = self._streams[priority]
        rows = self._redis.call("XPENDING", stream, keys.GROUP, "-", "+", len(busy) + 1, self._worker)
        for entry_id, _, _, delivered in rows:
            if entry_id not in busy:
                claimed = self._redis.call("XCLAIM", stream, keys.GROUP, self._worker, 0, entry_id)
                if not claimed or claimed[0] is None:  # somebody has deleted the entry itself
                    self._redis.call("XACK", stream, keys.GROUP, entry_id)
                    return self._oldest(priority)
                return [delivery(claimed[0], int(delivered) + 1, priority)]
        return []

    def reclaim(self) -> None:
        """Every third of a lease take over entries whose lease ran out; they then are this name's own."""
        if time.monotonic() < self._reclaim_at:
            return
        for stream in self._streams.values():
            if self._reclaim_from(stream):
                self._recover = True
                return  # there may be more: look again at the next take
        self._reclaim_at = time.monotonic() + self._lease_s / 3

    def _reclaim_from(self, stream: str) -> bool:
        cursor: Any = "0-0"
        lease_ms = int(self._lease_s * 1000)
        while True:
            # JUSTID: this is no delivery yet.
            args = [keys.GROUP, self._worker, lease_ms, cursor, RECLAIM_ENTRIES]
            cursor, claimed = self._redis.run("takeover", [stream], args)
            if any(entry_id is not None for entry_id in claimed):
                return True
            if cursor == b"0-0":
                return False
