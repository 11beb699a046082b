"""Entries of workers that died or fell silent: who they are, and making their entries this worker's own.

A worker on this host whose process is dead is noticed within LOOK_S. Of all others only silence is known:
their entries are taken over once they were not renewed for a lease.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gristmill import keys
from gristmill.driver import Connections
from gristmill_worker import process
from gristmill_worker.sources import black_box
from gristmill_worker.sources.black_box import Entry
from gristmill_worker.telemetry import logger

LOOK_S: Final = 0.25
SUSPECTS: Final = 16  # entries at a time where each runs alone: others want to help
TOGETHER: Final = 256  # where it is known what was in native code,
ALONE: Final = 1024  # and nobody else is here who could help
RECLAIMED: Final = 64


@dataclass(frozen=True, slots=True)
class Claimed:
    """Whether entries were taken over; ``calm`` ones need not run alone."""

    some: bool
    calm: Sequence[Entry] = ()


class Takeover:
    """Looks in one thread (:meth:`look`) and takes over in another (:meth:`claim`)."""

    def __init__(self, queue: str, worker: str, lease_s: float) -> None:
        self._queue = queue
        self._worker = worker
        self._streams = keys.streams(queue)
        self._processes = keys.processes(queue)
        self._lease_s = lease_s
        self._dead: dict[bytes, bytes] = {}  # worker -> its process; replaced as a whole
        self._alone = False  # no other worker lives on this host
        self._silent = False  # entries were not renewed for a lease
        self._scan_at = 0.0  # when to look through all entries: whatever else happens, none stays for ever

    def look(self, redis: Connections) -> None:
        """Find out whose entries may be taken over."""
        args = [keys.GROUP, self._worker, int(self._lease_s * 1000), process.here()]
        silent, *others = redis.run("look", [self._processes, *self._streams], args)
        self._silent = bool(silent)
        if silent:
            self._scan_at = 0.0
        known = self._dead
        found = dict(zip(others[::2], others[1::2], strict=True))
        self._dead = {
            name: it for name, it in found.items() if process.is_dead(it.decode("utf-8", "replace"))
        }
        self._alone = self._dead.keys() == found.keys()
        for name in self._dead.keys() - known.keys():
            logger().warning("worker_died", worker=name.decode("utf-8", "replace"))

    def is_due(self) -> bool:
        """Say whether there is something to take over, as far as is known."""
        return bool(self._dead) or self._silent

    def claim(self, redis: Connections) -> Claimed:
        """Make some of the entries that may be taken over this worker's own."""
        for name, its_process in list(self._dead.items()):
            claimed = self._inherit(redis, name, its_process)
            if claimed.some:
                return claimed
            self._dead.pop(name, None)
        return Claimed(time.monotonic() >= self._scan_at and self._scan(redis))

    def _inherit(self, redis: Connections, name: bytes, its_process: bytes) -> Claimed:
        """Take over what a dead process of this host had."""
        itself = its_process.decode("utf-8", "replace")
        exposed = black_box.read(itself)
        heartbeat = keys.worker(self._queue, name.decode("utf-8", "replace"))
        most = SUSPECTS if exposed is None else ALONE if self._alone else TOGETHER
        args = [keys.GROUP, self._worker, name, its_process, most]
        found = redis.run("inherit", [self._processes, heartbeat, *self._streams], args)
        if not found:
            black_box.remove(itself)
            return Claimed(some=False)
        priority = keys.PRIORITIES[found[0] - 1]
        entries = [(priority, entry_id) for entry_id in found[1]]
        calm = [] if exposed is None else [entry for entry in entries if entry not in exposed]
        return Claimed(some=True, calm=calm)

    def _scan(self, redis: Connections) -> bool:
        scan_at = time.monotonic() + self._lease_s / 3
        if any(self._reclaim(redis, stream) for stream in self._streams):
            return True
        self._scan_at, self._silent = scan_at, False
        return False

    def _reclaim(self, redis: Connections, stream: str) -> bool:
        lease_ms = int(self._lease_s * 1000)
        cursor: Any = "0-0"
        while True:
            args = [keys.GROUP, self._worker, lease_ms, cursor, RECLAIMED]
            cursor, claimed = redis.run("takeover", [stream], args)
            if any(entry_id is not None for entry_id in claimed):
                return True
            if cursor in {"0-0", b"0-0"}:
                return False
