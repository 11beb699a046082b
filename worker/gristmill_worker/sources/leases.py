"""Entries that one worker has in flight, and those under its name that it has to deliver again."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from gristmill import keys
from gristmill.driver import Connections
from gristmill_worker.sources.base import Delivery
from gristmill_worker.sources.black_box import Entry
from gristmill_worker.sources.reading import delivery
from gristmill_worker.sources.takeover import Claimed

MOST_PENDING: Final = 100_000  # entries under one name
CALM_DELIVERIES: Final = 2  # who saw more than one worker die runs alone whatever is known of it


class Leases:
    """What one worker has in flight on all streams of a queue."""

    def __init__(self, redis: Connections, queue: str, worker: str) -> None:
        self._redis = redis
        self._worker = worker
        self._streams = dict(zip(keys.PRIORITIES, keys.streams(queue), strict=True))
        self._recover = True  # a restarted worker may have entries under its name
        # By priority, as two streams may give the same entry ID.
        self._in_flight: dict[str, set[bytes]] = {priority: set() for priority in self._streams}
        self._calm: list[Entry] = []  # taken over, and not yet delivered
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

    def inherit(self, claimed: Claimed) -> None:
        """Let the next :meth:`own` find what was taken over."""
        self._recover = True
        self._calm += claimed.calm

    def own(self, count: int) -> list[Delivery]:
        """Take entries under this name that are not being worked on; this counts as a delivery.

        One that may have ended its worker comes alone, of the others up to ``count`` together.
        """
        while self._calm:
            if resumed := self._resume(count):
                return resumed
        if not self._recover:
            return []
        self._recover = False  # first: another thread may set it again meanwhile
        found: list[Delivery] = []
        for priority in self._streams:
            found = found or self._oldest(priority)
        self._recover = self._recover or bool(found)
        return found

    def _resume(self, count: int) -> list[Delivery]:
        """Take the first of the calm ones; nothing if all of these were finished or deleted meanwhile."""
        priority = self._calm[0][0]
        some = [entry for entry in self._calm if entry[0] == priority][:count]
        args = [keys.GROUP, self._worker, *(entry_id for _, entry_id in some)]
        found = self._redis.run("resume", [self._streams[priority]], args)
        self._calm = [entry for entry in self._calm if entry not in set(some)]
        deliveries = [delivery((entry_id, fields), int(times), priority) for entry_id, fields, times in found]
        for each in deliveries:
            each.calm = each.deliveries <= CALM_DELIVERIES
        return deliveries

    def _oldest(self, priority: str) -> list[Delivery]:
        with self._lock:
            busy = list(self._in_flight[priority])
        found = self._redis.run("own", [self._streams[priority]], [keys.GROUP, self._worker, *busy])
        return [delivery((found[0], found[1]), int(found[2]), priority)] if found else []
