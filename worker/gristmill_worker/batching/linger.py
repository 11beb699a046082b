"""When a window is closed: N requests or the bytes that it may hold, or the oldest has waited T."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gristmill.errors import BrokerUnavailable
from gristmill_worker.sources.base import Delivery

IDLE_S: Final = 0.25  # longest wait for a first request: how often the caller looks up
LOOKS: Final = 8  # at the queue during T


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one window holds: ``max_bytes`` of bodies, of which none has more than ``body_bytes``."""

    max_items: int
    max_bytes: int
    body_bytes: int

    def room(self, window: Sequence[Delivery]) -> int:
        """Return how many more requests fit for certain; a window that is empty has room for one."""
        items = self.max_items - len(window)
        if self.max_items * self.body_bytes <= self.max_bytes:
            return items
        held = sum(len(each.fields.get(b"body", b"")) for each in window)
        return min(items, max((self.max_bytes - held) // self.body_bytes, 0 if window else 1))


def drain(
    take: Callable[[int, float], Sequence[Delivery]], bounds: Bounds, max_wait_s: float
) -> list[Delivery]:
    """Return the deliveries that fit into ``bounds``, the first of them after at most IDLE_S.

    ``take(count, block_s)`` returns at its first delivery. The window stays open until its *oldest* request
    has been in the queue for ``max_wait_s``, so under backlog nobody waits.

    Redis cannot be asked for so many bytes. So each read asks for what fits however large it is, and where
    it got all of that, the next one follows at once.
    """
    asked = bounds.room(())
    found = take(asked, IDLE_S)
    window = list(found)
    if not window:
        return window
    # The age of the oldest is between two machines' clocks, so trust it only within [0, T].
    oldest_ms = min(each.enqueued_ms for each in window)
    age_s = min(max(time.time() - oldest_ms / 1000, 0.0), max_wait_s)
    ends = time.monotonic() + max_wait_s - age_s
    # Sleep and look, rather than block: a blocked read in an idle Redis times out up to 100 ms late.
    pause_s = max(max_wait_s / LOOKS, 0.001)
    while (room := bounds.room(window)) > 0:
        if len(found) < asked:  # nothing else waits
            if (left := ends - time.monotonic()) <= 0:
                break
            time.sleep(min(left, pause_s))
        asked = room
        try:
            found = take(asked, 0.0)
        except BrokerUnavailable:  # what was taken is not forgotten; the next window meets the error again
            break
        window += found
    return window
