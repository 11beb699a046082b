"""When a window is closed: N requests, or the oldest has waited T."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from gristmill.errors import BrokerUnavailable
from gristmill_worker.sources.base import Delivery

IDLE_S: Final = 0.25  # longest wait for a first request: how often the caller looks up
LOOKS: Final = 8  # at the queue during T


def drain(
    take: Callable[[int, float], Sequence[Delivery]], max_items: int, max_wait_s: float
) -> list[Delivery]:
    """Return up to ``max_items`` deliveries, the first of them after at most IDLE_S.

    ``take(count, block_s)`` returns at its first delivery. The window stays open until its *oldest* request
    has been in the queue for ``max_wait_s``, so under backlog nobody waits.
    """
    window = list(take(max_items, IDLE_S))
    if not window or len(window) >= max_items:
        return window
    # The age of the oldest is between two machines' clocks, so trust it only within [0, T].
    oldest_ms = min(each.enqueued_ms for each in window)
    age_s = min(max(time.time() - oldest_ms / 1000, 0.0), max_wait_s)
    ends = time.monotonic() + max_wait_s - age_s
    # Sleep and look, rather than block: a blocked read in an idle Redis times out up to 100 ms late.
    pause_s = max(max_wait_s / LOOKS, 0.001)
    while len(window) < max_items and (left := ends - time.monotonic()) > 0:
        time.sleep(min(left, pause_s))
        try:
            window += take(max_items - len(window), 0.0)
        except BrokerUnavailable:  # what was taken is not forgotten; the next window meets the error again
            break
    return window
