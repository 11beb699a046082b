"""One worker process as its supervisor sees it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final

from gristmill.errors import ExitCode
from gristmill_worker.settings import Settings
from gristmill_worker.supervisor.channel import Channel
from gristmill_worker.topology.plan import CoreSet
from gristmill_worker.vitals import Snapshot, trouble

SILENCE_S: Final = 30.0  # without a report from a worker that was ready
LOADING_S: Final = 1800.0


class Phase(Enum):
    """How far a worker process is."""

    LOADING = "loading"
    READY = "ready"  # warm, and waiting for its turn
    SERVING = "serving"
    DRAINING = "draining"  # told to finish what it has, and to end
    ENDED = "ended"


class Child:
    """Starts a process at once; all methods return at once. Raises OSError where none can be started."""

    def __init__(self, settings: Settings, cores: CoreSet, *, soon: bool = False) -> None:
        here, there = socket.socketpair()
        self.settings = settings.model_copy(
            update={"cores": cores.cpus, "threads": cores.threads, "metrics": None}
        )
        self.provisional = False  # it serves, and another one would be faster
        self.phase = Phase.LOADING
        self.since = self.heard_at = time.monotonic()  # of the phase, and of the last message
        self.served_at: float | None = None
        self.snapshot: Snapshot | None = None
        self.fresh_bytes = 0  # resident, when it was ready
        self.memory: dict[str, float] = {}  # rss_mb, pss_mb and uss_mb, as it said last
        self._is_deaf = self._is_killed = False
        self._excused_until = 0.0
        self.error = ""  # what it said before it ended
        # A module that happens to lie in the working folder is for a worker only if it is for the supervisor.
        flags = [] if str(Path.cwd()) in sys.path else ["-P"]
        command = [sys.executable, *flags, "-m", "gristmill_worker.supervisor.entry", str(there.fileno())]
        with there:
            try:
                # A process group of its own: Ctrl-C is for the supervisor alone.
                self._process = subprocess.Popen(command, pass_fds=[there.fileno()], process_group=0)
            except OSError:
                here.close()
                raise
        self.channel = Channel(here)
        with suppress(OSError):  # it ended at once
            self.channel.send(settings=self.settings.model_dump(mode="json"), soon=soon)
        here.setblocking(False)  # a worker that does not read must not hold up the others

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code once it has ended; minus a signal's number if that ended it."""
        return self._process.poll()

    def go(self, cores: CoreSet) -> None:
        """Let it serve, on ``cores``."""
        self._become(Phase.SERVING)
        self.served_at = self.since
        try:
            self.channel.send(go=cores.cpus)
        except OSError:
            self.kill()

    def drain(self) -> None:
        """Let it finish what it has taken, and end."""
        if self.phase not in {Phase.DRAINING, Phase.ENDED}:
            self._become(Phase.DRAINING)
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)  # if it was stopped

    def kill(self) -> None:
        self._is_killed = True
        self._process.kill()

    def excuse(self) -> None:
        """Do not judge it for a while: the supervisor itself was stopped, and knows nothing of meanwhile."""
        self._excused_until = time.monotonic() + SILENCE_S

    def hear(self) -> bool:
        """Take in what it sent; False if nothing more will come."""
        if self._is_deaf:
            return False
        try:
            messages = self.channel.receive()
        except BlockingIOError:
            return True
        self._is_deaf = messages is None
        for message in messages or ():
            self.heard_at = time.monotonic()
            if "ready" in message and self.phase is Phase.LOADING:
                self._become(Phase.READY)
                self.fresh_bytes = message["ready"]["rss_bytes"]
                self.provisional = "provisional" in message["ready"]["about"]
            self.snapshot = message.get("ready") or message.get("snapshot") or self.snapshot
            self.memory = message.get("memory", self.memory)
            self.error = message.get("failed", self.error)
        return messages is not None

    def complaint(self) -> str:
        """Say why it is to be killed, '' if it is not."""
        now = time.monotonic()
        if self._is_killed or now < self._excused_until:
            return ""
        if self.phase is Phase.LOADING and now - self.since > LOADING_S:
            return f"it was not ready after {LOADING_S:.0f} s"
        if self.phase in {Phase.READY, Phase.SERVING} and now - self.heard_at > SILENCE_S:
            return f"it did not report for {SILENCE_S:.0f} s"
        if self.phase is Phase.SERVING and self.snapshot is not None and (why := trouble(self.snapshot, now)):
            return why
        if self.phase is Phase.DRAINING and now - self.since > self.settings.shutdown_s:
            return f"it did not finish within {self.settings.shutdown_s:g} s (shutdown_s)"
        return ""

    def has_served(self, seconds: float) -> bool:
        """Say whether it has answered requests, or served for ``seconds`` at least."""
        if self.served_at is None:
            return False
        answered = self.snapshot is not None and self.snapshot["counters"]["requests"] > 0
        until = self.since if self.phase is Phase.ENDED else time.monotonic()
        return answered or until - self.served_at > seconds

    def reap(self) -> bool:
        """Note that it has ended; says whether that is news."""
        if self.phase is Phase.ENDED or self.code is None:
            return False
        self.hear()
        self._become(Phase.ENDED)
        return True

    def last_words(self) -> str:
        """Say how it ended."""
        if self.error:
            return self.error
        code = self.code or 0
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        names = {int(each): each.name.lower().replace("_", " ") for each in ExitCode}
        return f"it ended with exit code {code} ({names.get(code, 'unknown')})"

    def _become(self, phase: Phase) -> None:
        if self.phase is not Phase.ENDED:
            self.phase = phase
            self.since = time.monotonic()
