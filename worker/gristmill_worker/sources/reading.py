"""New entries of a queue: high priority first, none last for ever, nothing while paused (see WIRE.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from gristmill import keys, wire
from gristmill.driver import SOCKET_TIMEOUT_S, Connections
from gristmill_worker.sources.base import Delivery

PAUSE_LOOK_S: Final = 0.2  # how often a worker that is paused looks whether it still is
DEFAULT_FIRST: Final = 8  # every so many windows of a backlog begin with default,
LOW_FIRST: Final = 16  # and every so many with low


class Reader:
    """Takes new entries for one worker.

    Whether the queue is paused and any ID is cancelled comes with a window's first read, in the same send.
    """

    def __init__(self, redis: Connections, queue: str, worker: str) -> None:
        self._redis = redis
        self._streams = dict(zip(keys.PRIORITIES, keys.streams(queue), strict=True))
        self._priorities = {stream.encode(): priority for priority, stream in self._streams.items()}
        self._read = ("XREADGROUP", "GROUP", keys.GROUP, worker, "COUNT")
        self._flag = ("HGET", keys.config(queue), "paused")
        self._cancelled = keys.cancelled(queue)
        self._cancelling = False
        self._paused = True  # until Redis says otherwise
        self._ask = False  # for both, with the next read
        self._backlog = False
        self._windows = 0
        self._high = 0  # requests of high priority that went before windows, and do not make up one yet

    def paused(self) -> bool:
        """Say whether nothing may be taken; costs a look only where that was so at the last read."""
        if self._paused:
            self._paused = self._redis.call(*self._flag) == b"1"
        return self._paused

    def take(self, count: int, block_s: float) -> list[Delivery]:
        """Return up to ``count`` entries; waits up to ``block_s`` for the first.

        COUNT holds for each stream, so a read of all of them asks for a third. Only where a stream gives its
        whole third there is more to fetch; and in a backlog the streams are read one after the other at once.
        """
        self._ask = block_s > 0  # a window begins
        share = count // len(self._streams)
        in_turn = self._backlog or not share
        self._windows += in_turn and self._ask
        found: list[Delivery] = []
        if in_turn:
            found = self._in_turn(self._order(), count)
        if not found and (share or block_s):
            # Where N is 1 or 2, and each stream gets one at the very moment, all of them are taken.
            found = self._look(list(self._streams), max(share, 1), block_s)
            names = [delivery.priority for delivery in found]
            if len(found) < count and (longer := [p for p in self._streams if names.count(p) == share]):
                found += self._in_turn(longer, count - len(found))
        self._backlog = len(found) >= count
        return self.mark(found) if self._cancelling else found

    def take_high(self, count: int) -> list[Delivery]:
        """Return up to ``count`` entries of high priority, to run before windows that were taken before them.

        In a backlog so many requests as a window holds count as one: where the next window has to begin with
        another priority, that one has to come first.
        """
        if self._backlog and (self._windows + 1) % DEFAULT_FIRST == 0:
            return []
        self._ask = True
        found = self._look(list(self._streams)[:1], count, 0.0)
        self._high += len(found) if self._backlog else 0
        whole, self._high = divmod(self._high, count)
        self._windows += whole
        return self.mark(found) if self._cancelling else found

    def mark(self, found: list[Delivery]) -> list[Delivery]:
        """Mark those of ``found`` that are cancelled."""
        if found:
            ids = [each.fields.get(b"id", b"") for each in found]
            for each, since in zip(found, self._redis.call("ZMSCORE", self._cancelled, *ids), strict=True):
                each.cancelled = since is not None
        return found

    def _order(self) -> list[str]:
        """Return the priorities in the order for this window: the high ones first, but not every time."""
        high, default, low = self._streams
        if self._windows % LOW_FIRST == 0:
            return [low, high, default]
        if self._windows % DEFAULT_FIRST == 0:
            return [default, high, low]
        return [high, default, low]

    def _in_turn(self, order: Sequence[str], count: int) -> list[Delivery]:
        found: list[Delivery] = []
        for priority in order:
            if len(found) < count:
                found += self._look([priority], count - len(found), 0.0)
        return found

    def _look(self, priorities: Sequence[str], count: int, block_s: float) -> list[Delivery]:
        block_ms = int(min(block_s, SOCKET_TIMEOUT_S / 2) * 1000)
        block = ("BLOCK", block_ms) if block_ms else ()  # BLOCK 0 would wait for ever
        names = [self._streams[priority] for priority in priorities]
        read = (*self._read, count, *block, "STREAMS", *names, *(">" for _ in names))
        if self._ask:
            reply, paused, cancelled = self._redis.calls(read, self._flag, ("EXISTS", self._cancelled))
            self._paused, self._cancelling, self._ask = paused == b"1", bool(cancelled), False
        else:
            reply = self._redis.call(*read)
        found: list[Delivery] = []
        for stream, entries in reply or ():
            priority = self._priorities[stream]
            found += [delivery(entry, 1, priority) for entry in entries]
        return found


def delivery(entry: tuple[bytes, Sequence[bytes] | None], deliveries: int, priority: str) -> Delivery:
    """Return a stream's entry as it was delivered; it has no fields if it was deleted."""
    entry_id, fields = entry
    return Delivery(entry_id, wire.pairs(fields or ()), deliveries, priority)


def pause_for(block_s: float) -> None:
    """Wait as a read of a paused queue does."""
    time.sleep(min(block_s, PAUSE_LOOK_S))
