"""Requests under a hail of faults, and an account of every one of them: ``make chaos``.

Usage: python tests/chaos.py [--requests 200000] [--faults 80] [--seed 1] [--workers 3]

Ends with one line of JSON; the exit code is 0 if nothing was lost, doubled or wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from account import Account, Expected, Rows, body, expected
from chaos_worker import CRASH, HANG, SLOW
from conftest import Server, wait_until
from fleet import Fleet
from graphs import NAN_ROW, ROWS, write_lookup
from gristmill import Client, keys, wire
from gristmill.driver import ERRORS, Connections
from gristmill.errors import ErrorCode
from gristmill_worker.models.importer import import_model

QUEUE: Final = "chaos"
KINDS: Final = {  # of faults, and how often each comes
    "kill": 10,
    "stop": 6,
    "restart": 4,
    "connections": 6,
    "redis_kill": 4,
    "redis_shutdown": 2,
    "poison": 1,
    "hang": 1,
    "slow": 4,
    "malformed": 4,
    "huge": 3,
    "too_large": 3,
}
CHUNK: Final = 250
BACKLOG: Final = 4000  # requests that wait at the most
DRAIN_S: Final = 240.0


class Chaos:
    """One run: producers in threads, faults in this one."""

    def __init__(self, folder: Path, *, requests: int, faults: int, seed: int, workers: int) -> None:
        self.random = random.Random(seed)
        self.requests = requests
        self.faults = self.random.choices(list(KINDS), list(KINDS.values()), k=max(faults - len(KINDS), 0))
        self.faults += [kind for kind in KINDS if faults >= len(KINDS)]  # each at least once
        self.random.shuffle(self.faults)
        self.done: Counter[str] = Counter()
        self.account = Account()
        self.culprits: list[str] = []  # requests that are faults
        self.recovery_s: list[float] = []
        self.answered_s: list[float] = []
        self.errors: list[str] = []
        import_model(str(write_lookup(folder / "source")), folder / "model")
        (folder / "redis").mkdir()
        self._others = _children()
        self.server = Server(folder / "redis")
        self.server.start()
        self.fleet = Fleet(folder, self.server.url, QUEUE, workers)
        self.redis = Connections(self.server.url)
        self._made = 0
        self._gate = threading.Lock()
        self._waking: list[threading.Timer] = []

    # The producers

    def rows(self, chooser: random.Random) -> Rows:
        """Return a request; one in five hundred is a bad one."""
        most = ROWS + 2 if chooser.random() < 1 / 500 else NAN_ROW - 1
        return tuple(chooser.randint(0, most) for _ in range(chooser.randint(1, 4)))

    def pace(self, count: int) -> None:
        """Wait until ``count`` more may be made: requests and faults are to end together."""
        with self._gate:
            self._made += count
            made = self._made
        share = made / self.requests
        while sum(self.done.values()) < (share - 0.05) * len(self.faults) and not self.errors:
            time.sleep(0.02)

    def backpressure(self, client: Client) -> None:
        while client.depth(QUEUE).waiting > BACKLOG and not self.errors:
            time.sleep(0.05)

    def submitter(self, name: str, count: int, *, pushed: bool) -> None:
        """Submit under own IDs, now and then twice; ask for each result."""
        chooser = random.Random(name)
        with Client(self.server.url, retry_s=120) as client:
            if pushed:
                self.account.watch(client, QUEUE)
            for start in range(0, count, CHUNK):
                some = {f"{name}-{i}": self.rows(chooser) for i in range(start, min(start + CHUNK, count))}
                self.pace(len(some))
                self.account.ask({request_id: expected(rows) for request_id, rows in some.items()})
                ids = client.submit_many(QUEUE, map(body, some.values()), ids=list(some), reply=pushed)
                if chooser.random() < 0.1:
                    client.submit_many(QUEUE, map(body, some.values()), ids=list(some), reply=pushed)
                self.backpressure(client)
                if pushed or chooser.random() < 0.2:
                    for request_id in ids:
                        self.account.answer(request_id, client.result(request_id, DRAIN_S))

    def streamer(self, name: str, count: int) -> None:
        """Score through a stream whose results are only pushed (ttl 0)."""
        chooser = random.Random(name)
        asked: list[Rows] = []

        def items() -> Iterator[dict[str, Any]]:
            for i in range(count):
                if i % CHUNK == 0:
                    self.pace(min(CHUNK, count - i))
                asked.append(self.rows(chooser))
                self.account.ask({f"{name}-{i}": expected(asked[i])})
                yield body(asked[i])

        with Client(self.server.url, retry_s=120) as client:
            self.account.watch(client, QUEUE)
            for i, result in client.stream(QUEUE, items(), ordered=False, timeout_s=DRAIN_S):
                self.account.answer(f"{name}-{i}", result)

    # The faults

    def inject(self, kind: str) -> None:
        match kind:
            case "kill":
                self.kill()
            case "stop":
                process = self.random.choice(self.fleet.alive())
                process.send_signal(signal.SIGSTOP)
                self.later(self.random.uniform(0.5, 4), lambda: process.send_signal(signal.SIGCONT))
            case "restart":
                self.random.choice(self.fleet.alive()).terminate()
            case "connections":
                self.redis.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            case "redis_kill" | "redis_shutdown":
                self.server.stop(signal.SIGKILL if kind == "redis_kill" else signal.SIGTERM)
                time.sleep(self.random.uniform(0, 1.5))
                self.server.start()
                self.redis.close()
            case _:
                self.ask_for_it(kind)

    def ask_for_it(self, kind: str) -> None:
        """Add requests that are faults themselves."""
        match kind:
            case "poison":
                self.submit((1, CRASH))
            case "hang":
                self.submit((HANG, 2, 3))
            case "slow":
                self.submit((SLOW, 0))
            case "malformed":
                self.add("body", "{}")  # nobody to answer: a dead letter
                self.add("id", self.named(ErrorCode.BAD_REQUEST), "body", b"\xff{[")
                self.add(
                    "id", self.named(ErrorCode.BAD_REQUEST), "body", "{}", "ttl", "-1", "x", b"\x00" * 99
                )
            case "huge":
                padding = b" " * (wire.MAX_BODY_BYTES - 100)
                name = self.named(expected((3,)))
                self.add("id", name, "body", b'{"tensors": {"ids": [3]}' + padding + b"}")
            case "too_large":
                self.add("id", self.named(ErrorCode.TOO_LARGE), "body", b"x" * 2 * wire.MAX_BODY_BYTES)

    def named(self, want: Expected) -> str:
        name = f"fault-{len(self.account.expected)}"
        self.account.ask({name: want})
        return name

    def submit(self, rows: Rows) -> None:
        self.culprits.append(self.named(expected(rows)))
        with Client(self.server.url) as client:
            client.submit(QUEUE, body(rows), id=self.culprits[-1], reply=False)

    def add(self, *fields: str | bytes) -> None:
        self.redis.call("XADD", keys.requests(QUEUE), "*", *fields)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self._waking = [timer for timer in self._waking if timer.is_alive()]
        self._waking.append(threading.Timer(seconds, act))
        self._waking[-1].start()

    def pending(self, *owner: str) -> dict[bytes, bytes]:
        rows = self.redis.call("XPENDING", keys.requests(QUEUE), keys.GROUP, "-", "+", 10_000, *owner)
        return {row[0]: row[1] for row in rows}

    def kill(self) -> None:
        """Kill a worker at work and see how long what it held stays in its hands, and unanswered."""
        wait = time.monotonic() + 8
        while time.monotonic() < wait and not self.is_calm(self.fleet.alive()[0]):
            time.sleep(0.05)
        self.burst()
        process, held = self.freeze_at_work()
        owner = self.fleet.name_of(process)
        undisturbed = self.is_calm(process)
        process.kill()
        started = time.monotonic()
        held &= self.pending(owner).keys()  # it may have had time to finish them
        claimed = answered = 0.0
        while held and not answered and time.monotonic() - started < DRAIN_S:
            left = {entry: name for entry, name in self.pending().items() if entry in held}
            if not claimed and owner.encode() not in left.values():
                claimed = time.monotonic() - started
            if not left:
                answered = time.monotonic() - started
            time.sleep(0.01)
        if held and undisturbed and self.is_calm(process):
            self.recovery_s.append(claimed)
            self.answered_s.append(answered)
            print(
                f"         taken over after {claimed:.2f} s, {len(held)} answered after {answered:.2f} s",
                file=sys.stderr,
            )

    def burst(self) -> None:
        """Submit as much as keeps all workers busy for a while."""
        made = len(self.account.expected)
        some = {f"burst-{made}-{i}": self.rows(self.random) for i in range(BACKLOG)}
        self.account.ask({name: expected(rows) for name, rows in some.items()})
        with Client(self.server.url) as client:
            client.submit_many(QUEUE, map(body, some.values()), ids=list(some), reply=False)

    def freeze_at_work(self) -> tuple[subprocess.Popen[bytes], set[bytes]]:
        """Stop a worker while it has entries, if that can be had; return these too."""
        for _ in range(50):
            process = self.random.choice(self.fleet.alive())
            process.send_signal(signal.SIGSTOP)
            if held := set(self.pending(self.fleet.name_of(process))):
                break
            process.send_signal(signal.SIGCONT)
            time.sleep(0.02)
        return process, held

    def is_calm(self, victim: subprocess.Popen[bytes]) -> bool:
        """Say whether another worker serves, and no other fault is at work: then a recovery can be timed."""
        culprits = [keys.result(QUEUE, name) for name in self.culprits]
        return (
            self.fleet.serves_without(victim)
            and not any(timer.is_alive() for timer in self._waking)
            and wire.PENDING not in self.redis.call("MGET", QUEUE, *culprits)
        )

    # The run

    def run(self) -> dict[str, Any]:
        """Carry it out and return the account."""
        jobs: list[tuple[Callable[..., None], Sequence[Any], dict[str, Any]]] = [
            (self.submitter, ("stored", self.requests // 4), {"pushed": False}),
            (self.submitter, ("pushed", self.requests // 4), {"pushed": True}),
            (self.streamer, ("streamed", self.requests // 4), {}),
            (self.streamer, ("more", self.requests - 3 * (self.requests // 4)), {}),
        ]
        threads = [threading.Thread(target=self.guarded, args=job, daemon=True) for job in jobs]
        started = time.monotonic()
        with self.fleet:
            for thread in threads:
                thread.start()
            time.sleep(2)
            for kind in self.faults:
                self.inject_surely(kind)
                self.done[kind] += 1
                self.tell(kind, started)
                time.sleep(self.random.uniform(0.1, 0.8))
            for thread in threads:
                thread.join()
            for timer in self._waking:
                timer.join()
            wait_until(lambda: self.errors or not self.redis.call("XLEN", keys.requests(QUEUE)), DRAIN_S)
            seconds = time.monotonic() - started
            self.collect()
            report = self.report(seconds)
        self.server.stop()
        report["orphans"] = len(_children() - self._others)
        return report

    def tell(self, kind: str, started: float) -> None:
        waiting = self.redis.call("XLEN", keys.requests(QUEUE))
        passed = time.monotonic() - started
        print(
            f"{passed:6.1f} s {kind:14s} {len(self.account.answers)} of {self._made}, {waiting} in the queue",
            file=sys.stderr,
            flush=True,
        )

    def guarded(self, target: Callable[..., None], args: Sequence[Any], options: dict[str, Any]) -> None:
        try:
            target(*args, **options)
        except BaseException as error:  # noqa: BLE001 - it is the run's result
            self.errors.append(f"{target.__name__}{tuple(args)}: {error!r}")

    def inject_surely(self, kind: str) -> None:
        """Inject a fault; the fault before may have cut our own connection."""
        for _ in range(5):
            try:
                return self.inject(kind)
            except ERRORS:
                self.redis.close()
        raise RuntimeError(f"Redis does not answer: {kind} could not be injected")

    def collect(self) -> None:
        """Read the result keys of all that was not answered by a push, and again of what was."""
        names = [name for name in self.account.expected if not name.startswith(("streamed", "more"))]
        for start in range(0, len(names), CHUNK):
            some = names[start : start + CHUNK]
            for name, stored in zip(
                some, self.redis.call("MGET", *(keys.result(QUEUE, name) for name in some)), strict=True
            ):
                if stored not in (None, wire.PENDING, wire.DONE):
                    self.account.answer(name, wire.decode_result(stored))

    def report(self, seconds: float) -> dict[str, Any]:
        account = self.account
        lost = account.expected.keys() - account.answers.keys()
        doubled = account.doubled | {name for name, times in account.pushes.items() if times > 1}
        return {
            "requests": len(account.expected),
            "faults": dict(sorted(self.done.items())),
            "lost": len(lost),
            "doubled": len(doubled),
            "wrong": len(account.wrong),
            "dead_lettered": self.redis.call("XLEN", keys.dead(QUEUE)),
            "recovery_s": round(max(self.recovery_s, default=0.0), 2),
            "answered_s": round(max(self.answered_s, default=0.0), 2),
            "rss_growth_mb": round(self.fleet.growth_mb, 1),
            "left": self.redis.call("XLEN", keys.requests(QUEUE)),
            "pending": self.redis.call("XPENDING", keys.requests(QUEUE), keys.GROUP)[0],
            "worker_starts": self.fleet.starts,
            "seconds": round(seconds, 1),
            "errors": self.errors,
            "examples": [*sorted(lost)[:3], *account.wrong[:3], *sorted(doubled)[:3]],
        }


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def is_clean(report: dict[str, Any]) -> bool:
    """Say whether every request has exactly one right answer and nothing is left over."""
    return not any(
        report[name] for name in ("lost", "doubled", "wrong", "left", "pending", "errors", "orphans")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--faults", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Chaos(Path(folder), **vars(options)).run()
    print(json.dumps(report), flush=True)
    sys.exit(not is_clean(report))


if __name__ == "__main__":
    main()
