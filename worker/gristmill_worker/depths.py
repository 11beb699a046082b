"""What queues hold, for whoever asks often and must not wait: read from Redis at most every other second."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from gristmill.client import Client
from gristmill.console import needs_extra
from gristmill.core import Depth
from gristmill.errors import BrokerUnavailable
from gristmill_worker.settings import Settings
from gristmill_worker.telemetry import logger

FRESH_S: Final = 2.0
STALE_S: Final = 15.0  # an older depth says nothing any more
WAIT_S: Final = 1.0  # for Redis, by whoever asks
AWAY_S: Final = 1.0  # after it did not answer


class Reader(Protocol):
    """Reads a queue's depth now; a Client is one."""

    def depth(self, queue: str) -> Depth:
        """Raise BrokerUnavailable where it cannot be read."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Server:
    """What reads queues of one Redis, and until when that is taken to be away."""

    reader: Reader
    away_until: float = 0.0
    reason: str = ""


class Readers:
    """Reads each queue where, and as, its settings say; itself a Reader."""

    def __init__(self, found: Iterable[Settings] = ()) -> None:
        self._servers: dict[Hashable, _Server] = {}
        self._of: dict[str, _Server] = {}  # by queue; replaced as a whole
        self.know(found)

    def know(self, found: Iterable[Settings]) -> None:
        """Know the queues of ``found`` too; raises InputFileError where a package is missing for one."""
        self._of = self._of | {each.queue: self._server(each) for each in found}

    def depth(self, queue: str) -> Depth:
        """See :class:`Reader`; only of a queue that is known.

        Where a Redis does not answer, only the first of its queues that are asked for in a row waits for it.
        """
        server = self._of[queue]
        if time.monotonic() < server.away_until:
            raise BrokerUnavailable(server.reason)
        try:
            return server.reader.depth(queue)
        except BrokerUnavailable as error:
            if error.retryable:
                server.away_until, server.reason = time.monotonic() + AWAY_S, str(error)
            raise

    def close(self) -> None:
        for server in self._servers.values():
            server.reader.close()

    def _server(self, settings: Settings) -> _Server:
        key = (settings.redis, settings.source, settings.rq.with_scheduler)
        if key not in self._servers:
            self._servers[key] = _Server(_open(settings))
        return self._servers[key]


def _open(settings: Settings) -> Reader:
    if settings.source == "streams":
        return Client(settings.redis, retry_s=0.0)
    with needs_extra("rq"):
        from gristmill_worker.sources.rq.depth import RqDepths  # noqa: PLC0415 - an extra
    return RqDepths(settings.redis, scheduled=settings.rq.with_scheduler)


class Depths:
    """The depths of any queues; any thread may ask. Reads only when it is asked."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._wanted: set[str] = set()
        self._found: dict[str, tuple[float, Depth]] = {}
        self._looked_at = 0.0
        self._looking = False
        self._said = ""  # the last refusal that was logged
        self._changed = threading.Condition()

    def get(self, queues: Collection[str]) -> Mapping[str, Depth]:
        """Return the depths of those of ``queues`` that are known; a look may take up to WAIT_S."""
        now = time.monotonic()
        with self._changed:
            self._wanted = set(queues)
            if now - self._looked_at > FRESH_S or not self._wanted <= self._found.keys():
                if not self._looking:
                    self._looking = True
                    # A thread for each look: it may hang for as long as a dead network lets it.
                    threading.Thread(target=self._look, name="depths", daemon=True).start()
                self._changed.wait_for(lambda: not self._looking, WAIT_S)
            now = time.monotonic()
            return {
                queue: self._found[queue][1]
                for queue in queues
                if queue in self._found and now - self._found[queue][0] < STALE_S
            }

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()

    def _look(self) -> None:
        found: dict[str, tuple[float, Depth]] = {}
        for queue in self._wanted:
            try:
                found[queue] = (time.monotonic(), self._reader.depth(queue))
            except BrokerUnavailable as error:
                if not error.retryable and str(error) != self._said:
                    self._said = str(error)
                    logger().warning("depth_unknown", queue=queue, error=self._said)
        with self._changed:
            self._found = found
            self._looked_at = time.monotonic()
            self._looking = False
            self._changed.notify_all()
