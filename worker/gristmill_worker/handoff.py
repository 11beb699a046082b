"""Planned windows, on their way from the thread that takes them to the one that runs them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Queue
from typing import Final

from gristmill.keys import HIGH
from gristmill_worker.jobs import Batch

HELD_WINDOWS: Final = 2  # one runs, one is spare


@dataclass(frozen=True, slots=True)
class _Window:
    batches: Sequence[Batch]
    high: bool = False  # some of its requests are of high priority
    wake: bool = False  # no window: there is something that is urgent


class Handoff:
    """Bounds what one worker holds, and lets what cannot wait run before the rest.

    The first thread reserves a place for each window before it takes it, and then passes it on or gives the
    place back. The second one iterates over :meth:`batches`.
    """

    def __init__(self) -> None:
        self._places = threading.Semaphore(HELD_WINDOWS)
        self._high_passed = self._high_run = 0  # windows with such; each number is written by one thread
        self._planned: Queue[_Window | None] = Queue()  # bounded by the places
        self._urgent: deque[Batch | threading.Event] = deque()  # the event: all before it have run

    def reserve(self, timeout_s: float) -> bool:
        """Wait for a place and say whether there was one."""
        return self._places.acquire(timeout=timeout_s)

    def give_back(self) -> None:
        """Free a place that was reserved, and is not needed."""
        self._places.release()

    def pass_on(self, batches: Sequence[Batch]) -> None:
        """Let a window run for which a place is reserved; the place is free when it has run."""
        high = any(job.delivery.priority == HIGH for batch in batches for job in batch.jobs)
        self._high_passed += high
        self._planned.put(_Window(batches, high))

    def run_first(self, batches: Sequence[Batch]) -> None:
        """Let ``batches`` run after the batch of now, before all windows, and wait until they have run."""
        done = threading.Event()
        self._urgent.extend([*batches, done])
        self._planned.put(_Window((), wake=True))  # if nothing else is there to run
        done.wait()

    def holds_high(self) -> bool:
        """Say whether requests of high priority are in a window that runs or waits to."""
        return self._high_passed > self._high_run

    def is_idle(self) -> bool:
        """Say whether no window runs or waits to, beside the one whose place the caller has."""
        others = self._places.acquire(blocking=False)
        if others:
            self._places.release()
        return others

    def wait_until_idle(self) -> None:
        """Wait until everything that was passed on has run; the caller has no place."""
        for _ in range(HELD_WINDOWS):
            self._places.acquire()
        self._places.release(HELD_WINDOWS)

    def close(self) -> None:
        """End :meth:`batches` after what was passed on."""
        self._planned.put(None)

    def batches(self) -> Iterator[Batch]:
        """Yield each batch when its turn has come; it has run when the next one is asked for."""
        while (window := self._planned.get()) is not None:
            for batch in window.batches:
                yield from self._first()
                yield batch
            yield from self._first()
            self._high_run += window.high
            if not window.wake:
                self._places.release()

    def _first(self) -> Iterator[Batch]:
        while self._urgent:
            first = self._urgent.popleft()
            if isinstance(first, threading.Event):
                first.set()
            else:
                yield first
