"""What a benchmark runs on: a private Redis, real worker processes on chosen CPUs, and their counters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any, Final, Self

import orjson

from gristmill import Client, GristmillError, Result, guardian
from gristmill.embedded import PrivateRedis
from gristmill.errors import ResultTimeout
from gristmill_worker.settings import ENV_PREFIX, Settings
from gristmill_worker.sources.streams import connect
from gristmill_worker.telemetry import Counters

STAGES: Final = ("take", "encode", "plan", "run", "finish")
LEASE_S: Final = 3.0  # a heartbeat each second
START_TIMEOUT_S: Final = 600.0
ANSWER_TIMEOUT_S: Final = 60.0  # without any result the run has failed
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")  # the kernel's unit of CPU time
LOOK_S: Final = 1.0  # how often a caller that waits for results looks whether the worker still runs
_POLL_S: Final = 0.02
_LOG_CHARS: Final = 4000  # the end of a worker's log, shown with an error

_Shape = tuple[int, ...]


class BenchError(GristmillError):
    """A step failed. There are no figures then: a part of them would mislead."""


class Rig:
    """A private Redis and a client, both on this thread's CPUs; a context manager that ends all of it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._numbers = count()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.redis = stack.enter_context(PrivateRedis())
            self.client = stack.enter_context(Client(self.redis.url, retry_s=1.0))
            self._info = connect(self.redis.url)
            stack.callback(self._info.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def worker(self, queue: str, core: int, **settings: Any) -> Worker:
        """Start a worker of ``queue`` on one CPU; ``settings`` as in the worker's configuration."""
        name = f"bench-{next(self._numbers)}"
        settings |= {"cores": (core,), "lease_s": LEASE_S, "log_level": "warning"}
        return Worker(self, Settings(queue=queue, name=name, redis=self.redis.url, **settings))

    def redis_version(self) -> str:
        return str(self._info.info("server")["redis_version"])

    def redis_cpu_s(self) -> float:
        """Return the CPU seconds that the server has used."""
        used = self._info.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


class Worker:
    """One ``gristmill-worker run`` process, ready to serve; a context manager that ends it."""

    def __init__(self, rig: Rig, settings: Settings) -> None:
        self.queue = settings.queue
        self._name = str(settings.name)
        self._client = rig.client
        self._core = (settings.cores or (0,))[0]
        config = rig.redis.folder / f"{settings.name}.yaml"  # JSON is YAML too
        config.write_bytes(orjson.dumps(settings.model_dump(mode="json")))
        # A worker's own environment goes before its file: what is measured is what the file says.
        unset = [word for name in os.environ if name.startswith(ENV_PREFIX) for word in ("-u", name)]
        command = ["env", *unset, sys.executable, "-m", "gristmill_worker", "serve", str(config)]
        self._log: IO[bytes] = (rig.redis.folder / f"{settings.name}.log").open("w+b")
        self._process = guardian.spawn(command, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self._stat = Path(f"/proc/{int(self._beat()['pid'])}/stat")
        except BaseException as error:
            self._note_log(error)
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        self._note_log(error)
        self.close()

    def _note_log(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):  # not for Ctrl-C
            self._log.seek(0)
            error.add_note(self._log.read().decode(errors="replace")[-_LOG_CHARS:].strip() or "empty log")

    def close(self) -> None:
        """End the worker. May be called again."""
        guardian.stop(self._process)
        self._log.close()

    def counters(self, requests: int = 0) -> dict[str, int]:
        """Return the heartbeat's counters as soon as they count ``requests`` since the worker started."""
        while True:
            beat = self._beat()
            found = {name: int(beat[name]) for name in Counters().snapshot()}
            if found["requests"] >= requests:
                return found
            time.sleep(_POLL_S)

    def check_running(self, _silence_s: float = 0.0) -> None:
        """Raise BenchError if the process has ended; the end of its log is noted where the worker is left."""
        if (code := self._process.poll()) is not None:
            raise BenchError(f"worker {self._name} ended with exit code {code}")

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used."""
        user, system = self._stat.read_text("utf-8", "replace").rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICKS_PER_S

    def core_busy_s(self) -> float:
        """Return the seconds that this worker's CPU was busy, with whatever, or taken by a hypervisor."""
        return busy_s(Path("/proc/stat").read_text("ascii"), self._core)

    def _beat(self) -> dict[str, str]:
        ends = time.monotonic() + START_TIMEOUT_S
        while True:
            self.check_running()
            for beat in self._client.workers(self.queue):
                if beat["name"] == self._name:
                    return beat
            if time.monotonic() > ends:
                raise BenchError(f"worker {self._name} did not start within {START_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)


def busy_s(stat: str, core: int) -> float:
    """Return the busy seconds of one CPU in the text of ``/proc/stat``, hypervisor's steal included."""
    for line in stat.splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _iowait, *others = map(int, ticks[:8])
            return (user + nice + system + sum(others)) / TICKS_PER_S
    raise BenchError(f"/proc/stat has no CPU {core}")


@dataclass(slots=True)
class Flow:
    """What it took to score texts from a producer to its results, once or in several rounds.

    ``batches`` are, for each round, the (arrival, seconds in the engine) of its batches in order of arrival
    at the producer, by its monotonic clock; ``counts`` are the worker's counters; ``cpu_s`` are CPU seconds
    of worker, Redis and producer, and those that the worker's ``core`` was busy.
    """

    requests: int = 0
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)  # requests per second, one of each round
    batches: list[list[tuple[float, float]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def cpu_us_per_request(self) -> dict[str, float]:
        """Return CPU microseconds by stage, of the rest of the worker, of Redis and of the producer."""
        per = {stage: self.counts[f"{stage}_cpu_us"] / self.requests for stage in STAGES}
        whole = {part: seconds * 1e6 / self.requests for part, seconds in self.cpu_s.items()}
        rest = whole["worker"] - sum(per.values())
        return per | {"worker_other": rest, "redis": whole["redis"], "producer": whole["producer"]}

    def others_us_per_request(self) -> float:
        """Return the time that other processes, and a hypervisor, took from the worker's CPU."""
        return (self.cpu_s["core"] - self.cpu_s["worker"]) * 1e6 / self.requests

    def busy_share(self) -> float:
        """Return the engine's share of the time in the middle 70 % of each round's batches.

        There the queue is never empty. The time in the engine is what the worker's ``engine_us`` counts, here
        taken from the results, because these also tell when each batch ended: a heartbeat cuts batches in
        two. It is time by the clock on the wall, also while the CPU did something else.
        """
        busy = wall = 0.0
        for batches in self.batches:
            skipped = round(0.15 * len(batches))
            middle = batches[skipped : len(batches) - skipped]
            busy += sum(run_s for _, run_s in middle[1:])
            wall += middle[-1][0] - middle[0][0]
        if not wall:
            raise BenchError("too few batches to say how busy the engine is: give more texts with --count")
        return busy / wall


def score_all(
    rig: Rig, worker: Worker, texts: Sequence[str], flow: Flow, *, options: Mapping[str, Any], window: int
) -> None:
    """Score ``texts`` through the queue with at most ``window`` in flight, and add it to ``flow``.

    Raises BenchError if a text fails.
    """
    before = Counter(worker.counters())
    cpu = _cpu_s(rig, worker)
    batches: list[tuple[float, float]] = []
    last: tuple[float, _Shape] | None = None
    started = time.perf_counter()
    stream = rig.client.as_completed(
        worker.queue,
        texts,
        options=options,
        window=window,
        timeout_s=ANSWER_TIMEOUT_S,
        on_silence=worker.check_running,
    )
    for _, result in stream:
        check(result)
        batch = result.timing_ms["run"], tuple((result.batch or {})["shape"])
        if batch != last:
            batches.append((time.perf_counter(), batch[0] / 1000))
            last = batch
    seconds = time.perf_counter() - started
    for part, used in _cpu_s(rig, worker).items():
        flow.cpu_s[part] = flow.cpu_s.get(part, 0.0) + used - cpu[part]
    counted = Counter(worker.counters(before["requests"] + len(texts)))
    counted.subtract(before)
    flow.counts.update(counted)
    flow.requests += len(texts)
    flow.seconds += seconds
    flow.rates.append(len(texts) / seconds)
    flow.batches.append(batches)


def _cpu_s(rig: Rig, worker: Worker) -> dict[str, float]:
    return {
        "worker": worker.cpu_s(),
        "core": worker.core_busy_s(),
        "redis": rig.redis_cpu_s(),
        "producer": time.process_time(),
    }


def wait_for(client: Client, request_id: str, *workers: Worker) -> Result:
    """Return the result of a request; raise BenchError if it fails or one of ``workers`` ends."""
    ends = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            return check(client.result(request_id, LOOK_S))
        except ResultTimeout:
            for worker in workers:
                worker.check_running()
            if time.monotonic() > ends:
                raise


def check(result: Result) -> Result:
    """Return ``result`` if it is a value, else raise BenchError."""
    if not result.ok:
        raise BenchError(f"a request failed: {result.error or result.status}")
    return result
