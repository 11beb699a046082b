"""Figures of a supervised machine: replacement, reload, scaling, the supervisor's own share. `make machine`.

Everything is measured in one run on this machine, with a real Redis; each figure is a ratio, or stands beside
what it has to be compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from conftest import Server, wait_until
from gristmill import Client, keys
from gristmill.driver import Connections
from machine import Machine

QUEUE = "machine"
TEXT = "A mill grinds the grain of the whole valley, and the miller is paid in flour. " * 3


class Rig:
    """Starts supervisors on one queue with one model."""

    def __init__(self, folder: Path, url: str, model: Path, engine: str) -> None:
        self._folder = folder
        self.url, self.model, self.engine = url, model, engine
        self._args = ["--queue", QUEUE, "--redis", url, "--model", str(model), "--engine", engine]

    @contextmanager
    def machine(self, *args: str, **settings: Any) -> Iterator[Machine]:
        """Yield a supervisor all of whose workers serve."""
        config = self._folder / "machine.yaml"
        config.write_text(json.dumps(settings))
        with Machine(self._folder, str(config), *self._args, *args) as machine:
            machine.wait_for("machine_ready")
            yield machine
            machine.stop()

    @contextmanager
    def worker(self, name: str, core: int, lease_s: float) -> Iterator[subprocess.Popen[bytes]]:
        """Start a worker of its own, without a supervisor."""
        own = ["--name", name, "--cores", str(core), "--lease-s", str(lease_s), "--log-level", "error"]
        process = subprocess.Popen([sys.executable, "-m", "gristmill_worker", "serve", *self._args, *own])
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def trace(client: Client, seconds: float, act: Callable[[], None]) -> list[tuple[float, float]]:
    """Score a text every few ms for ``seconds``, and ``act`` after a third; returns (start, latency) in s."""
    found: list[tuple[float, float]] = []
    began = time.monotonic()
    timer = threading.Timer(seconds / 3, act)
    timer.start()
    while (now := time.monotonic()) < began + seconds:
        client.score(QUEUE, TEXT, timeout_s=60)
        found.append((now - began, time.monotonic() - now))
        time.sleep(0.005)
    timer.join()
    return found


def throughput(client: Client, count: int) -> float:
    """Return texts per second of one backlog, in its middle half: all workers are busy then."""
    texts = [f"{TEXT[: 40 + 7 * (i % 20)]} {i}" for i in range(count)]
    at = [
        time.monotonic()
        for number, _ in enumerate(client.stream(QUEUE, texts, ordered=False, window=count))
        if number in {count // 4, count // 4 * 3}
    ]
    return count / 4 * 2 / (at[1] - at[0])


def replacement(rig: Rig, spares: int) -> dict[str, float]:
    """Kill the only worker under load: how long until another one serves, and until the next answer."""
    with rig.machine("--workers", "1", spares=spares) as machine, Client(rig.url) as client:
        if spares:
            machine.wait_for("engine_ready", 1 + spares)
        served: list[float] = []

        def kill() -> None:
            count = len(machine.events("worker_serves"))
            began = time.monotonic()
            os.kill(machine.events("worker_serves")[-1]["pid"], signal.SIGKILL)
            machine.wait_for("worker_serves", count + 1)
            served.append(time.monotonic() - began)

        found = trace(client, 30.0, kill)
        return {"replaced_s": round(served[0], 2), "longest_wait_s": round(max(t for _, t in found), 2)}


def recovery(rig: Rig, *, elsewhere: bool, lease_s: float) -> dict[str, float]:
    """Kill one of two workers that both have more than they can do: how long what it held is nobody's.

    ``elsewhere``: the other one cannot see that its process is dead, as on another host.
    """
    with ExitStack() as stack:
        client = stack.enter_context(Client(rig.url))
        redis = stack.enter_context(closing(Connections(rig.url)))
        victim, other = (
            stack.enter_context(rig.worker(name, core, lease_s)) for core, name in enumerate("vo")
        )
        wait_until(lambda: len(client.workers(QUEUE)) == 2)
        client.submit_many(QUEUE, [f"{TEXT} {i}" for i in range(3000)], reply=False)
        wait_until(lambda: len(_pending(redis, "v")) > 256)  # more than one window
        if elsewhere:
            redis.call("HSET", keys.processes(QUEUE), "v", "elsewhere/1/pid:[1]/4711/1234")
        victim.kill()
        began = time.monotonic()
        held = _pending(redis, "v")
        wait_until(lambda: held - _pending(redis, "v"), 300)
        begun_s = time.monotonic() - began
        wait_until(lambda: not held & _pending(redis, "v"), 300)
        taken_over_s = time.monotonic() - began
        wait_until(lambda: not held & _pending(redis), 300)
        answered_s = time.monotonic() - began
        redis.call("DEL", *keys.streams(QUEUE))  # the rest is of no interest
        other.terminate()
        return {
            "held": len(held),
            "first_taken_over_s": round(begun_s, 2),
            "taken_over_s": round(taken_over_s, 2),
            "answered_s": round(answered_s, 2),
            "lease_s": lease_s,
        }


def _pending(redis: Connections, *owner: str) -> set[bytes]:
    rows = redis.call("XPENDING", keys.requests(QUEUE), keys.GROUP, "-", "+", 10_000, *owner)
    return {row[0] for row in rows}


def reload(rig: Rig) -> dict[str, Any]:
    """Reload under steady load: latencies before, and until the last new worker serves."""
    with rig.machine() as machine, Client(rig.url) as client:
        count = len(machine.events("worker_serves"))
        reloaded: list[float] = []
        began = time.monotonic()

        def hup() -> None:
            machine.signal(signal.SIGHUP)
            machine.wait_for("worker_serves", 2 * count)
            reloaded.append(time.monotonic() - began)

        found = trace(client, 45.0, hup)
        before = [latency for at, latency in found if at < 15.0]
        during = [latency for at, latency in found if 15.0 <= at < reloaded[0]]
        return {
            "requests": len(found),
            "seconds": round(reloaded[0] - 15.0, 1),
            "before_ms": _spread(before),
            "during_ms": _spread(during),
            "failed": 0,  # score() raises
        }


def _spread(latencies: Sequence[float]) -> dict[str, float]:
    ordered = sorted(latencies)
    at = {"p50": 0.5, "p99": 0.99}
    found = {name: round(ordered[int(share * (len(ordered) - 1))] * 1000, 1) for name, share in at.items()}
    return found | {"max": round(ordered[-1] * 1000, 1)}


def engines_alone(rig: Rig, cores: Sequence[int], seconds: float = 8.0) -> list[float]:
    """Return the batches per second of an engine on each of ``cores``, all at the same time."""
    script = str(Path(__file__).with_name("engine_alone.py"))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, script, str(rig.model), rig.engine, str(core), str(seconds)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            for core in cores
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [float(process.stdout.readline()) for process in processes if process.stdout is not None]


def scaling(rig: Rig, count: int, rounds: int) -> dict[str, float]:
    """Compare one worker, two workers of a core each, and one worker of two cores, in turns.

    Beside it what two engines alone do to one: cores share caches, memory and heat. The client and Redis run
    on the same cores as the workers.
    """
    kinds = {
        "one": ("--workers", "1"),
        "two": ("--workers", "2"),
        "wide": ("--workers", "1", "--cores-per-worker", "2"),
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    alone: list[float] = []
    share = []
    for _ in range(rounds):
        alone.append(sum(engines_alone(rig, [0, 1])) / sum(engines_alone(rig, [0])))
        for kind, args in kinds.items():
            with rig.machine(*args) as machine, Client(rig.url) as client:
                throughput(client, count // 8)
                itself = psutil.Process(machine.process.pid)
                before, began = sum(itself.cpu_times()[:2]), time.monotonic()
                rates[kind].append(throughput(client, count))
                share.append((sum(itself.cpu_times()[:2]) - before) / (time.monotonic() - began))
    median = {kind: statistics.median(found) for kind, found in rates.items()}
    return {
        "texts_per_s": round(median["one"], 1),
        "two_workers_to_one": round(median["two"] / median["one"], 3),
        "two_engines_alone_to_one": round(statistics.median(alone), 3),
        "two_of_one_core_to_one_of_two": round(median["two"] / median["wide"], 3),
        "supervisor_cpu_share": round(statistics.median(share), 4),
    }


def memory(rig: Rig) -> list[dict[str, float]]:
    """Return what each worker uses, as it said when it began to serve."""
    with rig.machine() as machine:
        names = ("rss_mb", "pss_mb", "uss_mb")
        return [{name: event[name] for name in names} for event in machine.events("worker_serves")]


def many_models(folder: Path, url: str, model: Path, count: int, **settings: Any) -> dict[str, Any]:
    """Have ``count`` models of one machine answer, each twice: how many stay loaded, and what they take."""
    paths = []
    for i in range(count):
        path = folder / f"model-{i}.yaml"
        own = {"queue": f"model-{i}", "model": str(model), "redis": url, "lazy": True}
        path.write_text(json.dumps(own | settings))
        paths.append(str(path))
    began = time.monotonic()
    first: list[float] = []
    second: list[float] = []
    with Machine(folder, *paths) as machine, Client(url) as client:
        for waits in (first, second):
            for i in range(count):
                asked = time.monotonic()
                client.score(f"model-{i}", TEXT, timeout_s=300)
                waits.append(time.monotonic() - asked)
        used = [worker.memory_full_info() for worker in machine.workers()]
        found = {
            "models": count,
            "loaded_at_the_end": len(used),
            "unloaded": len(machine.events("model_unloaded")),
            "pss_mb": round(sum(each.pss for each in used) / 2**20),
            "rss_mb": round(sum(each.rss for each in used) / 2**20),
            "available_mb": round(psutil.virtual_memory().available / 2**20),
            "first_answer_s": round(statistics.median(first), 2),
            "second_answer_s": round(statistics.median(second), 3),
            "seconds": round(time.monotonic() - began),
        }
        machine.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=int, default=4000, help="in each backlog")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--only", default="", help="figures with this in their names")
    parser.add_argument("--models", type=int, default=19, help="that one machine answers for")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(folder)
        server.start()
        rig = Rig(folder, server.url, args.model, args.engine)
        figures: dict[str, Callable[[], Any]] = {
            "memory": lambda: memory(rig),
            "kill -9, no spare": lambda: replacement(rig, 0),
            "kill -9, a spare": lambda: replacement(rig, 1),
            "kill -9 of one of two, saturated": lambda: recovery(rig, elsewhere=False, lease_s=30),
            "the same on another host": lambda: recovery(rig, elsewhere=True, lease_s=5),
            "rolling reload": lambda: reload(rig),
            "scaling": lambda: scaling(rig, args.texts, args.rounds),
            "many models": lambda: many_models(
                folder, server.url, args.model, args.models, engine=args.engine
            ),
        }
        for what, measure in figures.items():
            if args.only not in what:
                continue
            print(json.dumps({what: measure()}), flush=True)
        server.stop()


if __name__ == "__main__":
    main()
