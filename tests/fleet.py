"""Worker processes that are started again whenever they end: what a supervisor does, for the chaos test."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from gristmill import Client
from gristmill.errors import ExitCode, GristmillError

CONFIG: Final = """
lease_s: 2
batch_timeout_s: 6
max_deliveries: 4
log_level: warning
batch: {max_items: 256, max_wait_ms: 5, shapes: [[1, 4], [16, 4], [64, 4], [1, 512]]}
"""
WARM_S: Final = 4.0  # from its start until a worker's memory is taken as what it needs
SETTLED_S: Final = 12.0


class Fleet:
    """Keeps ``size`` workers of the chaos test running; a context manager."""

    def __init__(self, folder: Path, url: str, queue: str, size: int) -> None:
        self.starts = 0
        self.growth_mb = 0.0  # the most that the memory of one worker grew by after its first seconds
        self._folder = folder
        self._url = url
        self._queue = queue
        self._size = size
        self._running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}  # and since when
        self._first_mb: dict[int, float] = {}
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        (folder / "worker.yaml").write_text(CONFIG)

    def alive(self) -> list[subprocess.Popen[bytes]]:
        """Return the workers that run, in the order of their names."""
        while True:
            with self._lock:
                found = [self._running[name][0] for name in sorted(self._running)]
            if running := [process for process in found if process.poll() is None]:
                return running
            time.sleep(0.05)

    def name_of(self, process: subprocess.Popen[bytes]) -> str:
        with self._lock:
            return next(name for name, (other, _) in self._running.items() if other is process)

    def serves_without(self, process: subprocess.Popen[bytes]) -> bool:
        """Say whether some other worker has served for a while."""
        with self._lock:
            others = [(other, since) for other, since in self._running.values() if other is not process]
        return any(other.poll() is None and time.monotonic() - since > WARM_S for other, since in others)

    def __enter__(self) -> Self:
        self._start_missing()
        self._keeper.start()
        with Client(self._url) as client:
            while len(client.workers(self._queue)) < self._size:
                if self.starts > 3 * self._size:
                    raise GristmillError((self._folder / "workers.log").read_text("utf-8"))
                time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._keeper.join()
        for process, _ in self._running.values():
            process.terminate()
        codes = [process.wait(timeout=60) for process, _ in self._running.values()]
        # One that was stopped in the middle of a batch is ended by its own watchdog when it wakes; one that
        # was started just now has not yet learned to drain.
        if error is None and not {*codes} <= {0, -signal.SIGALRM, -signal.SIGTERM, ExitCode.INTERRUPTED}:
            raise GristmillError(f"workers ended with {codes} at the end")

    def _keep(self) -> None:
        while not self._done.wait(0.2):
            self._start_missing()
            self._weigh()

    def _start_missing(self) -> None:
        with self._lock:
            for name, (process, _) in list(self._running.items()):
                if process.poll() is not None:
                    del self._running[name]
            while len(self._running) < self._size:
                # Every other one comes back under the name of an earlier one.
                name = f"w{self.starts if self.starts % 2 else self.starts // 8}"
                if name in self._running:
                    name = f"v{self.starts}"
                self._running[name] = (self._start(name), time.monotonic())
                self.starts += 1

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, str(Path(__file__).with_name("chaos_worker.py"))]
        flags = [
            "--model",
            str(self._folder / "model"),
            "--queue",
            self._queue,
            "--redis",
            self._url,
            "--name",
            name,
        ]
        with (self._folder / "workers.log").open("ab") as log:
            return subprocess.Popen(
                [*program, "serve", str(self._folder / "worker.yaml"), *flags],
                stdout=log,
                stderr=log,
            )

    def _weigh(self) -> None:
        with self._lock:
            running = list(self._running.values())
        for process, since in running:
            age_s = time.monotonic() - since
            try:
                now_mb = psutil.Process(process.pid).memory_info().rss / 2**20
            except psutil.NoSuchProcess:
                continue
            if age_s >= WARM_S:
                first_mb = self._first_mb.setdefault(process.pid, now_mb)
                if age_s >= SETTLED_S:
                    self.growth_mb = max(self.growth_mb, now_mb - first_mb)
