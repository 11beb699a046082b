"""The process that a machine's workers belong to: it starts, watches, replaces and ends them.

It runs no model and answers no request itself. One thread waits for signals, for what the workers say and for
time to pass, and after each of these brings every team nearer to what is wanted.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

from gristmill.errors import ExitCode, GristmillError, InputFileError
from gristmill_worker.settings import Settings
from gristmill_worker.supervisor.child import Child, Phase
from gristmill_worker.supervisor.demand import Demand
from gristmill_worker.supervisor.room import available_mb, is_room
from gristmill_worker.supervisor.shares import Wish, share_cores
from gristmill_worker.supervisor.shown import Shown
from gristmill_worker.supervisor.team import CannotStartError, Team
from gristmill_worker.supervisor.watch import Watch
from gristmill_worker.telemetry import logger
from gristmill_worker.topology.facts import read_facts
from gristmill_worker.topology.plan import CoreSet
from gristmill_worker.vitals import Snapshot

TICK_S: Final = 0.25
WATCH_S: Final = 2.0
STOPPED_S: Final = 5.0  # without a step: this process was stopped itself, or the whole machine was
SCALING: Final = {signal.SIGTTIN: 1, signal.SIGTTOU: -1}
STOPPING: Final = {signal.SIGTERM, signal.SIGINT}
SIGNALS: Final = {*STOPPING, signal.SIGHUP, signal.SIGCHLD, *SCALING}


class Supervisor:
    """Runs a team of workers for each configuration; ``load`` reads these from ``paths``, again and again."""

    def __init__(
        self, paths: Sequence[Path], load: Callable[[], list[Settings]], *, max_loaded: int | None = None
    ) -> None:
        self._paths = paths
        self._load = load
        self._max_loaded = max_loaded  # models that are loaded on demand, at a time
        self._demand = Demand()
        self._teams: dict[str, Team] = {}  # by queue
        self._arriving: set[str] = set()  # queues that are new since a reload, and
        self._retiring: set[str] = set()  # those that are served until it is known that these can be
        self._facts = read_facts()
        self._watch = Watch()
        self._watch_at = 0.0
        self._snapshots: list[Snapshot] = []  # replaced as a whole: another thread reads it
        self._shown = Shown(lambda: self._snapshots)
        self._extra = 0  # workers of each team, beside what its settings say
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._stops = 0  # signals to stop
        self._stepped_at = time.monotonic()
        self._complete = False  # every worker has served once

    def run(self) -> ExitCode:
        """Run until a signal: the first lets all workers finish what they have, a second ends them at once.

        Raises InputFileError for settings that cannot be used, CannotStartError where no worker gets ready.
        """
        settings = self._load()
        with self._listening(), closing(self._shown):
            try:
                self._apply(settings)
                while not self._stops:
                    self._step()
                    self._look_for_changes()
                    self._load_on_demand()
            finally:
                self._demand.stop()
                forced = self._wind_up()
                logger().info("supervisor_stopped", forced=forced)
        return ExitCode.FORCED if forced else ExitCode.OK

    def _step(self) -> None:
        """Wait for something to happen, and do what follows from it."""
        for key, _ in self._selector.select(TICK_S):
            if not isinstance(key.data, Child):
                os.read(key.fd, 4096)
            elif not key.data.hear():
                self._selector.unregister(key.fileobj)
                key.data.channel.close()
        self._notice_a_stop()
        while scaling := signal.sigtimedwait(SCALING, 0):
            self._signals.append(scaling.si_signo)
        while self._signals:
            self._on_signal(self._signals.pop(0))
        for queue, team in list(self._teams.items()):
            try:
                team.reconcile()
            except CannotStartError as error:
                self._go_on_without(team, error)
            if team.is_over():
                del self._teams[queue]
        self._retire()
        if not (self._complete or self._stops) and all(team.is_complete() for team in self._teams.values()):
            self._complete = True
            logger().info("machine_ready", workers=sum(1 for _ in self._children()), queues=list(self._teams))
        self._snapshots = [each for team in self._teams.values() for each in team.snapshots()]

    def _notice_a_stop(self) -> None:
        """Judge no worker by what it last said before this process was stopped itself (Ctrl-Z, a freezer)."""
        before, self._stepped_at = self._stepped_at, time.monotonic()
        if self._stepped_at - before > STOPPED_S:
            for child in self._children():
                child.excuse()

    def _retire(self) -> None:
        """Let those go whose queues are served no more, once all others are, or where there is no memory."""
        new = [self._teams[queue] for queue in self._arriving if queue in self._teams]
        if all(team.is_complete() for team in new) or any(team.lacks_memory for team in new):
            self._arriving = set()
            for queue in self._retiring & set(self._teams):
                self._teams[queue].dismiss()
            if self._retiring:
                self._retiring = set()
                self._watch_demand()

    def _go_on_without(self, team: Team, error: CannotStartError) -> None:
        """Keep the other teams at work, once all had started; raises ``error`` where there is none."""
        if self._retiring and team.settings.queue in self._arriving:
            logger().error(
                "reload_failed", queue=team.settings.queue, error=str(error), kept="the workers that serve"
            )
            team.dismiss()
            self._arriving, self._retiring = set(), set()
            self._watch_demand()
            return
        others = [each for each in self._teams.values() if each is not team and not each.is_dismissed()]
        if not self._complete or not any(other.is_complete() for other in others):
            raise error
        logger().error("model_cannot_start", queue=team.settings.queue, error=str(error))

    def _wind_up(self) -> bool:
        """Let all workers finish; another signal ends them at once, which is then returned."""
        self._stops = max(self._stops, 1)  # an error stops as well
        for team in self._teams.values():
            team.dismiss()
        while self._teams and self._stops <= 1:
            self._step()
        for child in self._children():
            child.kill()
        return bool(self._teams)

    def _wanted(self) -> Iterator[Team]:
        for queue, team in self._teams.items():
            if not team.is_dismissed() and queue not in self._retiring:
                yield team

    def _watch_demand(self) -> None:
        self._demand.watch([team.settings for team in self._wanted() if team.settings.lazy])

    def _children(self) -> Iterator[Child]:
        for team in self._teams.values():
            yield from team.children()

    # What is wanted

    def _on_signal(self, number: int) -> None:
        if number in STOPPING:
            logger().info("draining", signal=signal.Signals(number).name)
            self._stops += 1
        elif self._stops:
            return
        elif number == signal.SIGHUP:
            self._reload(set(self._teams))
        elif number in SCALING:
            self._scale(SCALING[signal.Signals(number)])

    def _look_for_changes(self) -> None:
        if time.monotonic() < self._watch_at:
            return
        self._watch_at = time.monotonic() + WATCH_S
        models = {queue: team.settings.model for queue, team in self._teams.items()}
        if changed := self._watch.look({*self._paths, *models.values()}):
            logger().info("files_changed", files=[str(path) for path in changed])
            self._reload({queue for queue, model in models.items() if model in changed})

    def _reload(self, queues: Collection[str]) -> None:
        """Read the configurations again; teams of ``queues`` get new workers even if nothing changed."""
        try:
            self._apply(self._load(), queues)
        except GristmillError as error:
            logger().error("reload_refused", error=str(error), kept="the workers that serve")

    def _scale(self, more: int) -> None:
        settings = [team.settings for team in self._wanted()]
        before = self._shares(settings)
        self._extra += more
        try:
            if self._shares(settings) == before:  # else as many signals more would be needed later
                self._extra -= more
                logger().error("scaling_refused", error="each model has one worker already")
                return
            self._apply(settings)
        except InputFileError as error:
            self._extra -= more
            logger().error("scaling_refused", error=str(error))

    def _apply(self, found: Sequence[Settings], renewed: Collection[str] = ()) -> None:
        """Have one team for each of ``found``; raises InputFileError and has changed nothing then."""
        wanted = {settings.queue: settings for settings in found}
        if len(wanted) < len(found):
            raise InputFileError("two configurations name the same queue: each needs one of its own")
        shares = self._shares(found)
        self._shown.serve(found)
        self._arriving = (self._arriving | wanted.keys() - self._teams.keys()) & wanted.keys()
        self._retiring = set()
        for queue, team in self._teams.items():
            if queue not in wanted and self._arriving and team.snapshots():
                self._retiring.add(queue)
            elif queue not in wanted:
                team.dismiss()
        leaving = [self._teams[queue].settings for queue in self._retiring]
        self._demand.watch([settings for settings in (*found, *leaving) if settings.lazy])
        for (queue, settings), cores in zip(wanted.items(), shares, strict=True):
            if queue not in self._teams:
                self._teams[queue] = Team(settings, self._register, self._may_start)
            self._teams[queue].want(settings, cores, renew=queue in renewed)

    def _load_on_demand(self) -> None:
        """Load the lazy models that are asked for, in the place of others where there is room for no more."""
        short = any(team.lacks_memory for team in self._teams.values())
        tried = {queue for queue, team in self._teams.items() if team.had_its_try()}
        awake = self._demand.awake(self._max_loaded, short=short, tried=tried)
        for queue, team in self._teams.items():
            if team.settings.lazy:
                team.rest(queue not in awake)

    def _shares(self, found: Sequence[Settings]) -> list[list[CoreSet]]:
        wishes = [Wish(each.workers, each.cores_for_one, each.cores) for each in found]
        shares = share_cores(self._facts, wishes)
        if self._extra:
            counts = [max(1, len(share) + self._extra) for share in shares]
            wishes = [replace(wish, workers=count) for wish, count in zip(wishes, counts, strict=True)]
            shares = share_cores(self._facts, wishes)
        return shares

    # What the teams ask for

    def _register(self, child: Child) -> None:
        self._selector.register(child.channel, selectors.EVENT_READ, child)

    def _may_start(self, team: Team) -> bool:
        """Say whether one more worker may load now: one a core at a time, and only what memory allows."""
        kin = [child.phase is Phase.LOADING for child in team.children()]
        first = bool(kin) and not team.needs_mb  # it shows what the others will need
        loading = sum(child.phase is Phase.LOADING for child in self._children())
        if first or loading >= len(self._facts.cores):
            return False
        free_mb, before = available_mb(), team.lacks_memory
        team.lacks_memory = not is_room(team.needs_mb if kin else 0.0, sum(kin), free_mb)
        if team.lacks_memory and not before:
            logger().warning("worker_does_not_fit", queue=team.settings.queue, available_mb=round(free_mb))
        return not team.lacks_memory

    # Signals

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Collect signals, and wake up for them."""
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        self._selector.register(reader, selectors.EVENT_READ)
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # Blocked where logs are written, also in the workers, and asked for at each step: a background job
        # would be sent SIGTTOU for each try of each line to a terminal with 'tostop'. Threads that a library
        # started before do not block them, and get them as any others.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SCALING)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            os.close(reader)
            os.close(writer)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
