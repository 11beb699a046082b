"""What an RQ queue holds, for those who watch it."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from redis import Redis
from redis.exceptions import ResponseError
from rq import Queue

from gristmill.core import Depth
from gristmill.driver import ERRORS, Connections, translate
from gristmill_worker.sources.rq.names import Names

UNBOUNDED: Final = sys.maxsize  # RQ refuses nothing


class RqDepths:
    """Reads depths of RQ queues: started jobs count as pending, failed ones as dead letters.

    With ``scheduled`` jobs whose time has come wait as well, for a worker that brings them to the queue.
    """

    def __init__(self, url: str, *, scheduled: bool = False) -> None:
        self._url = url
        self._redis = Connections(url)
        self._scheduled = scheduled
        self._names: dict[str, Names] = {}

    def depth(self, queue: str) -> Depth:
        """Return what ``queue`` holds. Raises BrokerUnavailable."""
        if queue not in self._names:
            # Names only: nothing is connected.
            self._names[queue] = Names.of(Queue(queue, connection=Redis()), "")
        try:
            return self._depth(self._names[queue])
        except ERRORS as error:
            raise translate(error, self._url) from error

    def _depth(self, names: Names) -> Depth:
        waiting, first, due, started, failed, suspended, workers = self._redis.calls(
            ("LLEN", names.queue),
            ("LINDEX", names.queue, 0),
            ("ZCOUNT", names.scheduled, "-inf", int(time.time())),
            ("ZCARD", names.started),
            ("ZCARD", names.failed),
            ("EXISTS", names.suspended),
            ("HKEYS", names.processes),
        )
        popped = [names.of_worker(each.decode("utf-8", "replace")).popped for each in workers]
        between = self._redis.calls(*(("LLEN", name) for name in popped)) if popped else []
        since = None
        if first is not None:
            with suppress(ResponseError):  # its record is none: who takes it says so
                since = self._redis.call("HGET", names.job_prefix.encode() + first, "enqueued_at")
        return Depth(
            waiting=waiting + (due if self._scheduled else 0),
            pending=started + sum(between),
            dead=failed,
            max_length=UNBOUNDED,
            paused=bool(suspended),
            oldest_s=None if since is None else _age(since),
        )

    def close(self) -> None:
        self._redis.close()


def _age(stamp: bytes) -> float | None:
    with suppress(ValueError):  # anybody may have written it
        at = datetime.fromisoformat(stamp.decode("ascii", "replace"))
        return max(time.time() - (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(), 0.0)
    return None
