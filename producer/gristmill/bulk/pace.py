"""How many rows a run keeps in flight: enough for the workers never to wait, the same for every producer.

The share that a producer gets of a queue that is first in, first out is its share of what waits there. So
producers that all keep as much in flight get as much done, and what each keeps follows from what all of them
can see: how fast the workers are together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from gristmill.core import MAX_WINDOW
from gristmill.errors import BrokerUnavailable

AHEAD_S: Final = 2.0  # of the workers' time
LEAST_PER_WORKER: Final = 512  # two windows of the default size: one runs, one is encoded
LOOK_EVERY_S: Final = 2.0
LOOKS: Final = 6  # that the speed is taken from
MOST_BYTES: Final = 64 * 1024 * 1024  # of rows in flight

Workers = Sequence[Mapping[str, str]]


class Pace:
    """Gives the window of a run. ``look`` returns the heartbeats of the queue's workers; ``fixed`` is a
    number of rows that the user chose, None if it is to be found out.
    """

    def __init__(self, look: Callable[[], Workers], fixed: int | None = None) -> None:
        self._look = look
        self._fixed = fixed
        self.rows = fixed or 2 * LEAST_PER_WORKER
        self._held_bytes = 0
        self._full = False
        self._look_at = 0.0
        self._known: dict[tuple[str, str], int] = {}
        self._done = 0
        self._seen: deque[tuple[float, int]] = deque(maxlen=LOOKS)

    def window(self) -> int:
        """Return how many rows may be in flight; 0 while those that are have too many bytes."""
        # It opens again at half of it, as small refills make small batches.
        self._full = self._held_bytes > (MOST_BYTES // 2 if self._full else MOST_BYTES)
        return 0 if self._full else self.rows

    def took(self, size: int) -> None:
        """A row of ``size`` bytes was read."""
        self._held_bytes += size

    def gave(self, size: int) -> None:
        """The row was written."""
        self._held_bytes -= size

    def update(self) -> None:
        """Look at the workers now and then, and follow their speed."""
        now = time.monotonic()
        if self._fixed is not None or now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        with suppress(BrokerUnavailable):  # the stream has the same trouble and is the one to report it
            self._take(self._look(), now)

    def _take(self, workers: Workers, now: float) -> None:
        known = {}
        for worker in workers:
            name = worker.get("name", ""), worker.get("started_ms", "")
            known[name] = int(worker.get("requests", "0"))
            self._done += known[name] - self._known.get(name, known[name])
        self._known = known
        self._seen.append((now, self._done))
        since, then = self._seen[0]
        per_s = (self._done - then) / (now - since) if now > since else 0.0
        least = LEAST_PER_WORKER * max(len(workers), 1)
        self.rows = min(max(round(per_s * AHEAD_S), least), MAX_WINDOW)
