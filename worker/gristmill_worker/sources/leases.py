"""Entries that one worker has in flight, and those under its name that it has to deliver again."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from gristmill import keys
from gristmill.driver import Connections
from gristmill_worker.sources.base import Delivery
from gristmill_worker.sources.reading import delivery

MOST_PENDING: Final = 100_000  # entries under one name


class Leases:
    """What one worker has in flight on all streams of a queue."""

    def __init__(self, redis: Connections, queue: str, worker: str) -> None:
        self._redis = redis
        self._worker = worker
        self._streams = dict(zip(keys.PRIORITIES, keys.streams(queue), strict=True))
        self._recover = True  # a restarted worker may have entries under its name
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

    def renew(self, redis: Connections) -> None:
        """Renew the lease of everything in flight that is still this worker's; from any thread."""
        for priority, stream in self._streams.items():
            with self._lock:
                held = list(self._in_flight[priority])
            if held:
                redis.run("renew", [stream], [keys.GROUP, self._worker, MOST_PENDING, *held])

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
            busy = list(self._in_flight[priority])
        found = self._redis.run("own", [self._streams[priority]], [keys.GROUP, self._worker, *busy])
        return [delivery((found[0], found[1]), int(found[2]), priority)] if found else []
