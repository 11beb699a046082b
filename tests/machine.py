"""``gristmill-worker run`` as a process, with what it has logged and the workers that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import orjson
import psutil

from conftest import wait_until


class Machine:
    """A supervisor under test; a context manager that leaves nothing behind.

    ``python`` are Python's arguments, ``wrapped`` a program that is to start it.
    """

    def __init__(
        self,
        folder: Path,
        *args: str,
        env: dict[str, str] | None = None,
        python: Sequence[str] = ("-m", "gristmill_worker"),
        wrapped: Sequence[str] = (),
        cwd: Path | None = None,
        command: str = "run",
    ) -> None:
        self.log = folder / f"supervisor-{len(list(folder.glob('supervisor-*')))}.log"
        line = [*wrapped, sys.executable, *python, command, *args]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                line, stdout=log, stderr=log, env={**os.environ, **(env or {})}, cwd=cwd
            )
        self._own = psutil.Process(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        left = [self._own, *self.workers()] if self._own.is_running() else []
        for process in left:
            process.kill()
        self.process.wait(timeout=30)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what was logged under ``name``."""
        found = []
        whole, _, _ = self.log.read_bytes().rpartition(b"\n")  # the last line may be half there
        for line in whole.splitlines():
            if line.startswith(b"{"):
                event = orjson.loads(line)
                found += [event] if event["event"] == name else []
        return found

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until ``name`` was logged ``count`` times, and return these events."""
        wait_until(lambda: len(self.events(name)) >= count or self.process.poll() is not None)
        events = self.events(name)
        assert len(events) >= count, self.log.read_text("utf-8")
        return events

    def workers(self) -> list[psutil.Process]:
        found = []
        for child in self._own.children():
            with suppress(psutil.NoSuchProcess):  # it has ended just now
                found += [child] if child.status() != psutil.STATUS_ZOMBIE else []
        return found

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """Let it drain; returns its exit code."""
        self.signal(signal.SIGTERM)
        return self.process.wait(timeout=60)
