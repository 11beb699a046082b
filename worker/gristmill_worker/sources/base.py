"""The source protocol: take, finish, and the records that pass between a source and the loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from gristmill.driver import Connections
from gristmill.keys import DEFAULT
from gristmill.wire import Result


@dataclass(slots=True)
class Delivery:
    """One entry as it was delivered; ``deliveries`` counts this one. A cancelled one is not to run.

    A ``calm`` one was in no native code when the worker died that had it before.
    """

    entry_id: bytes
    fields: Mapping[bytes, bytes]
    deliveries: int
    priority: str = DEFAULT
    cancelled: bool = False
    calm: bool = False
    _enqueued_ms: int = field(default=-1, init=False, repr=False, compare=False)  # -1: not read yet

    @property
    def suspect(self) -> bool:
        """Whether it may have ended a worker, and so is to run alone."""
        return self.deliveries > 1 and not self.calm

    @property
    def enqueued_ms(self) -> int:
        """Unix time of its arrival in the queue, by Redis's clock."""
        if self._enqueued_ms < 0:  # it is asked for several times
            self._enqueued_ms = int(self.entry_id.partition(b"-")[0])
        return self._enqueued_ms


@dataclass(slots=True)
class Outcome:
    """What becomes of a delivery.

    ``result`` is None if the request has no usable ID; ``ttl_s`` None means the worker's default;
    a ``reason`` sends the entry to the dead letters.
    """

    delivery: Delivery
    result: Result | None
    reply: str | None = None
    ttl_s: int | None = None
    reason: str = ""


class Source(Protocol):
    """A queue. All methods raise BrokerUnavailable while it cannot be reached."""

    def take(self, count: int, block_s: float) -> list[Delivery]:
        """Return up to ``count`` deliveries; waits up to ``block_s`` for the first."""
        ...

    def take_urgent(self, count: int, *, high: bool) -> list[Delivery]:
        """Return at once up to ``count`` deliveries that are to go before all that this worker has taken.

        They were with workers that died, or, with ``high``, are of high priority.
        """
        ...

    def finish(self, outcomes: Sequence[Outcome]) -> int:
        """Store the outcomes atomically; returns how many counted (others were answered elsewhere)."""
        ...

    def release(self, deliveries: Sequence[Delivery], after_s: float = 0.0) -> None:
        """Give up working on ``deliveries``: the next ``take`` delivers again those not finished.

        With ``after_s`` they stay this worker's for so many seconds more before that.
        """
        ...

    def exposing(self, deliveries: Iterable[Delivery]) -> AbstractContextManager[None]:
        """Note that ``deliveries`` are in native code while the block runs: suspects if it crashes."""
        ...

    def reachable(self) -> bool:
        """Say whether the queue's server answers at all."""
        ...

    def recover(self) -> None:
        """Let the next ``take`` look for entries that a lost reply left under this worker's name."""
        ...


class ServedSource(Source, Protocol):
    """A source as a whole process serves it; the pulse's thread calls the first three with its connection."""

    def renew(self, redis: Connections) -> None:
        """Renew the hold on everything in flight."""
        ...

    def beat(self, redis: Connections, fields: Mapping[str, str], ttl_s: int) -> None:
        """Write this worker's heartbeat."""
        ...

    def look(self, redis: Connections) -> None:
        """Find out what dead workers left."""
        ...

    def leave(self) -> None:
        """Sign off and close."""
        ...
