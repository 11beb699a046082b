"""What queues and their workers do, from successive looks at Redis; for ``gristmill top``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gristmill.client import Client
from gristmill.core import Depth
from gristmill.errors import BrokerUnavailable

QUEUES_A_LOOK: Final = 100  # where there are more, the fullest are looked at each time, the others in turn
_DIGITS: Final = 18
_COUNTERS: Final = ("requests", "errors", "batches", "tokens", "padded_tokens", "engine_us")

Beat = Mapping[str, str]  # a worker's heartbeat; anybody may have written there


@dataclass(frozen=True, slots=True)
class WorkerLook:
    """A worker that lives. Rates are those between its last two heartbeats, or else since its start.

    ``busy`` is the share of time that its engine ran, ``efficiency`` that of tokens which are no padding
    (None: nothing ran); ``age_s`` counts from its last heartbeat, between two machines' clocks.
    """

    name: str
    host: str
    pid: int
    model: str
    engine: str
    busy: float
    requests_s: float
    efficiency: float | None
    rss_bytes: int
    age_s: float | None
    counters: Mapping[str, int]  # since its start


@dataclass(frozen=True, slots=True)
class QueueLook:
    """A queue: its depth, or the error that Redis had for it."""

    name: str
    depth: Depth | None
    workers: tuple[WorkerLook, ...] = ()
    error: str = ""

    @property
    def requests_s(self) -> float:
        return sum(worker.requests_s for worker in self.workers)

    @property
    def held(self) -> int:
        return self.depth.waiting + self.depth.pending if self.depth else 0


class Watch:
    """Looks again and again; remembers what rates and large numbers of queues need."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._queues: dict[str, QueueLook] = {}
        self._beats: dict[tuple[str, str], tuple[Beat | None, Beat]] = {}  # the last two that differ
        self._next = 0  # of the others, by name

    def look(self, most: int | None = QUEUES_A_LOOK) -> list[QueueLook]:
        """Return all queues, the fullest first, of which up to ``most`` are looked at now.

        Raises BrokerUnavailable.
        """
        names = self._client.queues()
        self._queues = {name: look for name, look in self._queues.items() if name in set(names)}
        for name in self._choose(names, len(names) if most is None else most):
            self._queues[name] = self._look_at(name)
        serving = {(look.name, worker.name) for look in self._queues.values() for worker in look.workers}
        self._beats = {key: beats for key, beats in self._beats.items() if key in serving}
        return sorted(self._queues.values(), key=lambda look: (-look.held, look.name))

    def _choose(self, names: list[str], most: int) -> list[str]:
        if len(names) <= most:
            return names
        fullest = sorted(self._queues.values(), key=lambda look: (-look.held, not look.workers, look.name))
        chosen = [look.name for look in fullest[: most // 2]]
        others = sorted(set(names).difference(chosen))
        self._next %= len(others)
        in_turn = (others[self._next :] + others)[: most - len(chosen)]
        self._next += len(in_turn)
        return chosen + in_turn

    def _look_at(self, name: str) -> QueueLook:
        try:
            depth = self._client.depth(name)
            beats = self._client.workers(name)
        except BrokerUnavailable as error:
            if error.retryable:
                raise
            return QueueLook(name, None, error=str(error))  # e.g. a key that is of another type
        workers = sorted((self._worker(name, beat) for beat in beats), key=lambda worker: worker.name)
        return QueueLook(name, depth, tuple(workers))

    def _worker(self, queue: str, beat: Beat) -> WorkerLook:
        key = (queue, beat.get("name", ""))
        before, last = self._beats.get(key, (None, beat))
        if last.get("started_ms") != beat.get("started_ms"):  # another process under this name
            before, last = None, beat
        elif last.get("beat_ms") != beat.get("beat_ms"):
            before, last = last, beat
        self._beats[key] = before, last
        since_ms = _number(before, "beat_ms") if before else _number(last, "started_ms")
        seconds = max(_number(last, "beat_ms") - since_ms, 1) / 1000
        done = {name: _number(last, name) - (_number(before, name) if before else 0) for name in _COUNTERS}
        beat_ms = _number(last, "beat_ms")
        return WorkerLook(
            name=key[1],
            host=beat.get("host", ""),
            pid=_number(beat, "pid"),
            model=beat.get("model", ""),
            engine=" ".join(filter(None, (beat.get("engine"), beat.get("precision")))),
            busy=done["engine_us"] / 1e6 / seconds if beat_ms else 0.0,
            requests_s=done["requests"] / seconds if beat_ms else 0.0,
            efficiency=done["tokens"] / done["padded_tokens"] if done["padded_tokens"] > 0 else None,
            rss_bytes=_number(beat, "rss_bytes"),
            age_s=max(time.time() - beat_ms / 1000, 0.0) if beat_ms else None,
            counters={name: _number(beat, name) for name in _COUNTERS},
        )


def _number(beat: Beat, name: str) -> int:
    text = beat.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else 0
