"""Entries that wait under a worker's name, with their lease renewed, to be delivered to it again."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Final

from gristmill_worker.sources.base import Delivery

MOST: Final = 1000  # that wait at a time; from then on the worker takes nothing new: others may be better off


class Deferred:
    """What waits, and until when. Only names are kept: a body is read again when its time has come."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Delivery]] = []  # a heap by time.monotonic()
        self._number = count()
        self._lock = threading.Lock()

    def add(self, deliveries: Iterable[Delivery], after_s: float) -> None:
        due = time.monotonic() + after_s
        with self._lock:
            for each in deliveries:
                heapq.heappush(self._waiting, (due, next(self._number), replace(each, fields={})))

    def pop(self) -> list[Delivery]:
        """Return one whose time has come, or nothing."""
        with self._lock:
            if self._waiting and self._waiting[0][0] <= time.monotonic():
                return [heapq.heappop(self._waiting)[2]]
            return []

    def wait_s(self) -> float:
        """Return how long it takes until the next one's time has come; inf if none waits."""
        with self._lock:
            return max(self._waiting[0][0] - time.monotonic(), 0.0) if self._waiting else math.inf

    def full(self) -> bool:
        return len(self._waiting) >= MOST
