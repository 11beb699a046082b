"""What a worker holds of an RQ queue: kept fresh while it runs, put back where it ends without a result."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from rq.utils import utcformat

from gristmill.driver import Connections
from gristmill_worker import process
from gristmill_worker.sources.rq.names import Names
from gristmill_worker.telemetry import logger

STARTED_TTL_S: Final = 90  # RQ counts a job as abandoned when it was not renewed for so long
RENEW_S: Final = 20.0


class Holding:
    """One worker's jobs in flight, each named by job:execution; thread-safe."""

    def __init__(self, redis: Connections, names: Names, worker: str, lease_s: float) -> None:
        self._redis = redis
        self._names = names
        self._worker = worker
        self._lease_ms = int(lease_s * 1000)
        self._prefixes = (names.job_prefix, names.execution_prefix, names.job_executions_prefix)
        self._in_flight: dict[str, float] = {}  # and when it was renewed, by the monotonic clock
        self._given_up: list[str] = []
        self._suspects: set[str] = set()  # in flight, and may have ended a worker
        self._recover = False
        self._lock = threading.Lock()
        self._dropped = threading.Condition(self._lock)

    def add(self, entry: str, *, suspect: bool) -> None:
        with self._lock:
            self._in_flight[entry] = time.monotonic()
            if suspect:
                self._suspects.add(entry)

    def drop(self, entries: Iterable[str]) -> None:
        with self._lock:
            for entry in entries:
                self._in_flight.pop(entry, None)
                self._suspects.discard(entry)
            self._dropped.notify_all()

    def is_calm(self, wait_s: float) -> bool:
        """Say whether no suspect is in flight, after waiting for that.

        Nothing is taken beside one: if its callback ends this process, nothing else is to blame.
        """
        with self._dropped:
            return self._dropped.wait_for(lambda: not self._suspects, wait_s)

    def any_job(self) -> str | None:
        """Return the ID of one of the jobs in flight."""
        with self._lock:
            entry = next(iter(self._in_flight), None)
        return None if entry is None else entry.rpartition(":")[0]

    def give_up(self, entries: Iterable[str]) -> None:
        """Have ``entries`` put back by the next :meth:`put_back`; this counts as a delivery."""
        with self._lock:
            self._given_up += entries

    def recover(self) -> None:
        """Have put back whatever is held and not in flight: what a lost reply brought."""
        self._recover = True

    def enter(self) -> None:
        """Be known to those who would put back, and put back what an earlier process of this name held."""
        self.sign(self._redis)
        self._requeue(self._redis, self._names, "except", [], delivered=True)  # it may have killed that one

    def put_back(self) -> None:
        """Put back what was given up, or is held for no reason."""
        with self._lock:
            given_up = list(self._given_up)
        if given_up:
            self._requeue(self._redis, self._names, "only", given_up, delivered=True)
            with self._lock:
                del self._given_up[: len(given_up)]
            self.drop(given_up)
        if self._recover:
            self._recover = False  # first: another thread may set it again meanwhile
            with self._lock:
                busy = list(self._in_flight)
            self._requeue(self._redis, self._names, "except", busy, delivered=False)

    def leave(self) -> None:
        """Put back everything, and be no worker any more."""
        self._requeue(self._redis, self._names, "except", [], delivered=False)
        self._redis.calls(("HDEL", self._names.processes, self._worker), ("DEL", self._names.alive))

    def sign(self, redis: Connections) -> None:
        """Give a sign of life that holds for a lease."""
        redis.calls(
            ("SET", self._names.alive, "1", "PX", self._lease_ms),
            ("HSET", self._names.processes, self._worker, process.own()),
        )

    def renew(self, redis: Connections) -> None:
        """Keep RQ from counting as abandoned what runs for long."""
        due = time.monotonic() - RENEW_S
        with self._lock:
            entries = [entry for entry, renewed_at in self._in_flight.items() if renewed_at < due]
        if not entries:
            return
        args = [*times(time.time()), STARTED_TTL_S, *self._prefixes, *entries]
        redis.run("rq_renew", [self._names.held, self._names.started], args)
        renewed_at = time.monotonic()
        with self._lock:
            self._in_flight |= {entry: renewed_at for entry in entries if entry in self._in_flight}

    def look(self, redis: Connections) -> None:
        """Put back what dead workers held, and forget these."""
        args = [self._names.alive_prefix, self._worker, process.here()]
        rows = redis.run("rq_look", [self._names.processes], args)
        for name, its_process, silent in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            dead = process.is_dead(its_process.decode("utf-8", "replace"))
            if silent or dead:
                who = (name, its_process, "1" if dead else "")
                names = self._names.of_worker(name.decode("utf-8", "replace"))
                count = self._requeue(redis, names, "except", [], delivered=True, dead=who)
                logger().warning("worker_died", worker=name.decode("utf-8", "replace"), put_back=count)

    def _requeue(
        self,
        redis: Connections,
        names: Names,
        mode: str,
        entries: Sequence[str],
        *,
        delivered: bool,
        dead: tuple[bytes | str, bytes | str, str] = ("", "", ""),
    ) -> int:
        """Run rq_requeue.lua."""
        keys = [names.queue, names.popped, names.held, names.started, names.executions]
        keys += [names.processes, names.alive, names.worker, names.workers, names.queue_workers]
        args = ["1" if delivered else "", *self._prefixes, mode, *dead, *entries]
        count: int = redis.run("rq_requeue", keys, args)
        return count


def times(unix_s: float) -> tuple[str, str]:
    """Return a time as RQ writes it in a job's record, and in an execution's."""
    return utcformat(datetime.fromtimestamp(unix_s, tz=UTC)), f"{unix_s:.6f}"
