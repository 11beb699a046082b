"""Which of the models that are loaded on demand are to be loaded now."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from gristmill.errors import BrokerUnavailable
from gristmill_worker.depths import Readers
from gristmill_worker.settings import Settings

LOOK_S: Final = 0.2
TURN_S: Final = 30.0  # a model that has work keeps its place for so long, then one that waits gets it


@dataclass(slots=True)
class Lazy:
    """One model that is loaded on demand; times are monotonic."""

    queue: str
    idle_s: float  # without a request, until it may be unloaded
    entries: int = 0  # requests in the queue, also those that a worker has
    used_at: float = 0.0
    awake: bool = False  # loaded, or being loaded
    turn_at: float | None = None  # awake: since when it serves, or it turned out that it cannot
    left_at: float = 0.0  # when it was unloaded the last time


def choose_awake(models: Sequence[Lazy], most: int, now: float) -> set[str]:
    """Return the queues whose models are to be loaded, ``most`` at a time.

    A model stays while it was used within ``idle_s``. One that is asked for gets a free place, or that of
    the one without requests that was used the least recently, or else of one that has had its turn. Who had
    none for the longest goes first.
    """
    awake = [each for each in models if each.awake]
    awake = [each for each in awake if each.entries or now - each.used_at < each.idle_s]
    asked = sorted(
        (each for each in models if each.entries and not each.awake), key=lambda each: each.left_at
    )
    chosen = {each.queue for each in awake}
    leaving = sorted((each for each in awake if not each.entries), key=lambda each: each.used_at)
    turns = [(each.turn_at, each) for each in awake if each.entries and each.turn_at is not None]
    leaving += [each for at, each in sorted(turns, key=lambda turn: turn[0]) if now - at > TURN_S]
    for each in asked:
        if len(chosen) >= most:
            if not leaving:
                break
            chosen.discard(leaving.pop(0).queue)
        chosen.add(each.queue)
    return chosen


class Demand(threading.Thread):
    """Looks at the queues of lazy models, in a thread of its own: Redis may take its time to answer."""

    def __init__(self) -> None:
        super().__init__(name="demand", daemon=True)
        self._models: dict[str, Lazy] = {}
        self._readers = Readers()
        self._watched: tuple[str, ...] = ()  # queues
        self._entries: dict[str, int] = {}  # as far as known; replaced as a whole
        self._done = threading.Event()

    def watch(self, teams: Sequence[Settings]) -> None:
        """Look at the queues of ``teams``, and at no others."""
        self._readers.know(teams)
        known = self._models
        self._models = {each.queue: known.get(each.queue) or Lazy(each.queue, each.idle_s) for each in teams}
        for each in teams:
            self._models[each.queue].idle_s = each.idle_s
        self._watched = tuple(self._models)
        if self._watched and not self.is_alive():
            self.start()

    def awake(self, most: int | None, *, short: bool, tried: Collection[str]) -> set[str]:
        """Return the queues whose models are to be loaded; ``short``: there is memory for no more.

        Those in ``tried`` serve, or could not get ready: their turn has begun.
        """
        now = time.monotonic()
        for queue, model in self._models.items():
            model.entries = self._entries.get(queue, 0)
            if model.entries:
                model.used_at = now
            if model.awake and model.turn_at is None and queue in tried:
                model.turn_at = now
        there = sum(model.awake for model in self._models.values())
        places = min(most or len(self._models), max(there, 1) if short else len(self._models))
        chosen = choose_awake(list(self._models.values()), places, now)
        for queue, model in self._models.items():
            if model.awake and queue not in chosen:
                model.turn_at, model.left_at = None, now
            model.awake = queue in chosen
        return chosen

    def run(self) -> None:
        """Look until :meth:`stop`."""
        while not self._done.wait(LOOK_S):
            entries = {}
            for queue in self._watched:
                try:
                    depth = self._readers.depth(queue)
                    entries[queue] = depth.waiting + depth.pending
                except BrokerUnavailable:  # what is loaded says what is wrong
                    entries[queue] = self._entries.get(queue, 0)
            self._entries = entries
        self._readers.close()

    def stop(self) -> None:
        """Let the thread end."""
        self._done.set()
