"""What an RQ queue holds, for those who watch it."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from redis import Redis
from rq import Queue

from gristmill.core import Depth
from gristmill.driver import ERRORS, Connections, translate
from gristmill_worker.sources.rq.names import Names

UNBOUNDED: Final = sys.maxsize  # RQ refuses nothing


class RqDepths:
    """Reads depths of RQ queues: started jobs count as pending, failed ones as dead letters."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._redis = Connections(url)

    def depth(self, queue: str) -> Depth:
        """Return what ``queue`` holds. Raises BrokerUnavailable."""
        names = Names.of(Queue(queue, connection=Redis()), "")  # names only: nothing is connected
        try:
            waiting, first, started, failed, suspended = self._redis.calls(
                ("LLEN", names.queue),
                ("LINDEX", names.queue, 0),
                ("ZCARD", names.started),
                ("ZCARD", names.failed),
                ("EXISTS", names.suspended),
            )
            since = None
            if first is not None:
                since = self._redis.call("HGET", f"{names.job_prefix}{first.decode()}", "enqueued_at")
        except ERRORS as error:
            raise translate(error, self._url) from error
        oldest_s = None if since is None else _age(since)
        return Depth(waiting, started, failed, UNBOUNDED, paused=bool(suspended), oldest_s=oldest_s)

    def close(self) -> None:
        self._redis.close()


def _age(stamp: bytes) -> float | None:
    with suppress(ValueError):  # anybody may have written it
        at = datetime.fromisoformat(stamp.decode("ascii", "replace"))
        return max(time.time() - (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(), 0.0)
    return None
