"""The worker processes of one configuration: one a core set, replaced where they end or are stale."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gristmill.errors import ExitCode, GristmillError
from gristmill_worker.settings import Settings
from gristmill_worker.supervisor.child import Child, Phase
from gristmill_worker.telemetry import logger
from gristmill_worker.topology.plan import CoreSet
from gristmill_worker.vitals import Snapshot

BACKOFF_S: Final = 0.25, 10.0
PROVEN_S: Final = 30.0  # who served for so long, or answered anything, is followed by another at once
MOST_FAILURES: Final = 5  # to get ready, in a row, while nobody serves


class CannotStartError(GristmillError):
    """Workers end before they are ready; the exit code tells wrong settings from other causes."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Slot:
    """A core set and who is on it."""

    cores: CoreSet
    current: Child | None = None  # serves
    incoming: Child | None = None  # loads, to fill the slot or to take over from the current one
    stale: bool = False  # the current one is to be replaced
    urgent: bool = False  # who serves next is to do so soon: requests wait for it


class Team:
    """Brings its processes nearer to what is wanted, by a step at each :meth:`reconcile`."""

    def __init__(
        self, settings: Settings, register: Callable[[Child], None], may_start: Callable[[Team], bool]
    ) -> None:
        self.settings = settings
        self._register = register  # is called with each new process
        self._may_start = may_start  # says whether one more process may load now
        self._slots: list[Slot] = []
        self._spares: list[Child] = []
        self._leaving: list[Child] = []
        self._cores: Sequence[CoreSet] = []
        self._asleep = settings.lazy
        self.lacks_memory = False  # said by may_start
        self.needs_mb = 0.0  # what a worker had for itself alone when it was ready; 0: none was yet
        self._good: Settings | None = None  # the last ones with which a worker got ready
        self._proven = False  # the present ones are such
        self._failures = 0  # in a row: short lives, and
        self._not_ready = 0  # those that ended before they were ready
        self._refused = 0  # in a row: those that Redis refused for good, while none has lasted
        self._not_before = 0.0

    def want(self, settings: Settings, cores: Sequence[CoreSet], *, renew: bool) -> None:
        """Have one worker on each of ``cores``; new ones with ``renew`` or where the settings are others."""
        others = settings.model_copy(update={"workers": self.settings.workers})
        renew = renew or others != self.settings
        self.settings = settings
        self._cores, self._asleep = cores, self._asleep and settings.lazy
        self._arrange()
        if renew:
            self._proven = False
            self._failures, self._not_ready, self._not_before = 0, 0, 0.0
            self._leave(*self._spares)
            self._spares = []
            for slot in self._slots:
                self._leave(slot.incoming)
                slot.incoming = None
                slot.stale = slot.current is not None

    def rest(self, asleep: bool) -> None:
        """Have no worker while ``asleep``."""
        if asleep != self._asleep:
            logger().info("model_unloaded" if asleep else "model_wanted", queue=self.settings.queue)
            self._asleep = asleep
            self._arrange()

    def dismiss(self) -> None:
        """Let all workers finish what they have, and end."""
        self._cores = []
        self._arrange()

    def _arrange(self) -> None:
        """Have a slot for each core set, and none where nobody is to serve."""
        cores = [] if self._asleep else self._cores
        kept = [slot for slot in self._slots if slot.cores in cores]
        for slot in self._slots:
            if slot not in kept:
                self._leave(slot.current, slot.incoming)
        there = [slot.cores for slot in kept]
        self._slots = kept + [Slot(each, urgent=self.settings.lazy) for each in cores if each not in there]
        if not cores:
            self._leave(*self._spares)
            self._spares = []
            self.lacks_memory = False

    def is_dismissed(self) -> bool:
        return not self._cores

    def is_over(self) -> bool:
        """Say whether nothing is left of a team that was dismissed."""
        return not self._cores and not self._leaving

    def children(self) -> Iterator[Child]:
        """Iterate over all processes that have not ended."""
        for slot in self._slots:
            yield from (child for child in (slot.current, slot.incoming) if child is not None)
        yield from self._spares
        yield from self._leaving

    def snapshots(self) -> list[Snapshot]:
        """Return what the workers that serve have last said of themselves."""
        serving = [slot.current for slot in self._slots if slot.current is not None]
        return [child.snapshot for child in serving if child.snapshot is not None]

    def is_complete(self) -> bool:
        """Say whether a worker serves on every core set."""
        return all(slot.current is not None for slot in self._slots)

    def had_its_try(self) -> bool:
        """Say whether a worker serves, or could not get ready."""
        return self._not_ready > 0 or any(slot.current is not None for slot in self._slots)

    def reconcile(self) -> None:
        """Take note of what ended; start, promote and end processes. Raises CannotStartError."""
        self._bury()
        for child in self.children():
            if complaint := child.complaint():
                logger().error("worker_killed", pid=child.pid, reason=complaint)
                child.kill()
        for slot in self._slots:
            self._recycle(slot)
            self._fill(slot)
        empty = [slot for slot in self._slots if slot.current is None and slot.incoming is None]
        for slot in empty:
            slot.incoming = self._start(slot.cores, soon=slot.urgent)
        if not empty and all(slot.incoming is None for slot in self._slots):
            # One at a time: the others keep up the throughput meanwhile.
            old = [slot for slot in self._slots if slot.stale]
            old += [slot for slot in self._slots if slot.current and slot.current.provisional]
            if old:
                self._replace(old[0])
            elif self._slots and len(self._spares) < self.settings.spares:
                spare = self._start(self._slots[0].cores)
                self._spares += [spare] if spare is not None else []
            else:
                self.lacks_memory = False

    def _replace(self, slot: Slot) -> None:
        """Start who is to take over.

        Where there is no memory for both a stale one has to end first, and one that is provisional stays.
        """
        self.lacks_memory = False
        slot.incoming = self._start(slot.cores)
        if self.lacks_memory and slot.stale:
            self._leave(slot.current)
            slot.current, slot.stale, slot.urgent = None, False, True
        elif self.lacks_memory and slot.current is not None:
            self.lacks_memory = slot.current.provisional = False

    def _fill(self, slot: Slot) -> None:
        """Let a process that is warm serve on ``slot`` if that needs one."""
        if slot.incoming is not None and slot.incoming.phase is Phase.READY:
            new, slot.incoming = slot.incoming, None
        elif slot.current is None and (spare := self._ready_spare()) is not None:
            new = spare
            self._spares.remove(new)
            self._spares += [slot.incoming] if slot.incoming is not None else []
            slot.incoming = None
        else:
            return
        new.go(slot.cores)
        self.needs_mb = max(self.needs_mb, new.memory["uss_mb"]) if new.provisional else new.memory["uss_mb"]
        self._good, self._proven, self._not_ready = self.settings, True, 0
        old, slot.current, slot.stale, slot.urgent = slot.current, new, False, False
        place = {"queue": self.settings.queue, "cores": slot.cores.cpus}
        logger().info("worker_serves", pid=new.pid, instead_of=old and old.pid, **place, **new.memory)
        if _is_too_large(new.fresh_bytes, self.settings):
            logger().warning("max_rss_mb_too_small", pid=new.pid, why="a new worker has more: all are kept")
        self._leave(old)

    def _ready_spare(self) -> Child | None:
        return next((child for child in self._spares if child.phase is Phase.READY), None)

    def _recycle(self, slot: Slot) -> None:
        """Have a worker replaced that has grown too large, unless all are so from the start."""
        child = slot.current
        if child is None or child.snapshot is None or slot.stale:
            return
        rss_bytes, limit_mb = child.snapshot["rss_bytes"], child.settings.max_rss_mb
        if _is_too_large(rss_bytes, child.settings) and not _is_too_large(child.fresh_bytes, child.settings):
            slot.stale = True
            logger().warning("worker_too_large", pid=child.pid, rss_mb=rss_bytes / 2**20, max_rss_mb=limit_mb)

    def _start(self, cores: CoreSet, *, soon: bool = False) -> Child | None:
        if time.monotonic() < self._not_before or not self._may_start(self):
            return None
        try:
            child = Child(self.settings, cores, soon=soon)
        except OSError as error:  # no process, descriptor or memory to be had
            logger().error("worker_not_started", queue=self.settings.queue, error=str(error))
            self._back_off()
            self._did_not_get_ready(f"no process can be started: {error}", ExitCode.FAILURE)
            return None
        logger().info("worker_starts", pid=child.pid, queue=self.settings.queue, cores=cores.cpus)
        self._register(child)
        return child

    def _leave(self, *children: Child | None) -> None:
        for child in children:
            if child is not None:
                child.drain()
                self._leaving.append(child)

    def _bury(self) -> None:
        """Take out the processes that have ended."""
        self._leaving = [child for child in self._leaving if not child.reap()]
        for slot in self._slots:
            if slot.current is not None and slot.current.reap():
                child, slot.current, slot.stale, slot.urgent = slot.current, None, False, True
                self._lost(child)
            if slot.incoming is not None and slot.incoming.reap():
                child, slot.incoming = slot.incoming, None
                if slot.current is not None:
                    slot.current.provisional = False  # it is kept: a whole one does not get ready here
                self._lost(child)
        for child in [child for child in self._spares if child.reap()]:
            self._spares.remove(child)
            self._lost(child)

    def _lost(self, child: Child) -> None:
        """Note that a process ended by itself; when the next one may start follows from that."""
        logger().error("worker_ended", pid=child.pid, queue=self.settings.queue, reason=child.last_words())
        if child.has_served(PROVEN_S):
            self._failures, self._not_ready, self._not_before = 0, 0, 0.0
            self._refused = 0
            return
        self._back_off()
        if child.served_at is None:
            self._did_not_get_ready(child.last_words(), child.code)
        else:  # requests ended it, and each of these is given up after some deliveries; or Redis refused it
            self._was_refused(child)

    def _back_off(self) -> None:
        self._failures += 1
        pause_s = min(BACKOFF_S[0] * 2 ** min(self._failures - 1, 16), BACKOFF_S[1])
        self._not_before = time.monotonic() + pause_s

    def _was_refused(self, child: Child) -> None:
        """Raise CannotStartError where Redis refuses every worker for good, e.g. as it is no cluster."""
        self._refused = self._refused + 1 if child.code == ExitCode.BROKER_UNAVAILABLE else 0
        lasting = any(slot.current is not None and slot.current.has_served(PROVEN_S) for slot in self._slots)
        if self._refused >= MOST_FAILURES and not lasting:
            raise CannotStartError(child.last_words(), ExitCode.BROKER_UNAVAILABLE)

    def _did_not_get_ready(self, reason: str, code: int | None) -> None:
        """Go back to settings that could be used, or raise CannotStartError, where trying again is no use."""
        self._not_ready += 1
        too_often = self._not_ready >= MOST_FAILURES
        if self._good is None and code == ExitCode.BAD_INPUT:
            raise CannotStartError(reason, ExitCode.BAD_INPUT)
        if self._good is not None and not self._proven and (too_often or code == ExitCode.BAD_INPUT):
            self._go_back(self._good)
        elif too_often and not any(slot.current is not None for slot in self._slots):
            what = f"{self._not_ready} workers in a row ended before they were ready, the last one: "
            raise CannotStartError(what + reason, ExitCode.CRASH_LOOP)

    def _go_back(self, good: Settings) -> None:
        """Keep the workers that serve, and their settings: those that were to replace them cannot start."""
        logger().error("reload_failed", queue=self.settings.queue, kept="the workers that serve")
        self.settings = good.model_copy(update={"workers": self.settings.workers})
        self._proven, self._not_ready = True, 0
        for slot in self._slots:
            slot.stale = False


def _is_too_large(rss_bytes: int, settings: Settings) -> bool:
    return settings.max_rss_mb is not None and rss_bytes / 2**20 > settings.max_rss_mb
