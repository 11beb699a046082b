"""Bulk runs under kill -9 of producer, workers and Redis, compared with unbroken ones: ``make bulk-chaos``.

Usage: python tests/bulk_chaos.py [--rows 60000] [--kills 20] [--seed 1] [--model DIR]

Each run scores the same file with an engine that computes nothing, so its output has to be the same byte
for byte. A producer that was killed is started again with the same command. Runs follow each other until all
kills were made. The exit code is 0 if every output was right.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

from bulk_rows import write_input
from checkpoints import write_checkpoint
from conftest import LABELS, Server, wait_until
from gristmill import Client
from gristmill.errors import ExitCode
from gristmill_worker.models.importer import import_model

QUEUE: Final = "bulk-chaos"
WORKERS: Final = 2
NAMES: Final = ("out.csv", "out.jsonl.gz", "out.parquet", "out.csv.zst")
ENDED: Final = (ExitCode.OK, ExitCode.ROWS_FAILED)
KILLS_PER_RUN: Final = 5
LATEST_S: Final = 1.5  # a kill comes at most so long after the one before
PATIENCE_S: Final = 240.0  # only there to end a broken run
# "forget": Redis comes back empty, as one without persistence does.
KINDS: Final = {"producer": 8, "worker": 6, "redis": 4, "forget": 2}


class Chaos:
    """A Redis, two workers and one producer after the other, each of which may be killed."""

    def __init__(self, folder: Path, model: Path, *, rows: int, seed: int) -> None:
        self.folder = folder
        self.model = model
        self.random = random.Random(seed)
        self.source = write_input(folder / "in.csv", seed, rows)
        (folder / "redis").mkdir()
        self.server = Server(folder / "redis")
        self.server.start()
        self.made: Counter[str] = Counter()
        self.starts = 0
        self.workers = [self._start_worker() for _ in range(WORKERS)]
        with Client(self.server.url) as client:
            wait_until(lambda: len(client.workers(QUEUE)) == WORKERS)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.server.stop(signal.SIGKILL)

    def _start_worker(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        command = [sys.executable, "-m", "gristmill_worker", "run", "--model", str(self.model)]
        command += ["--queue", QUEUE, "--redis", self.server.url, "--engine", "null"]
        command += ["--name", f"w{self.starts}", "--lease-s", "2", "--log-level", "warning"]
        with (self.folder / "workers.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def start_producer(self, out: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gristmill.cli", "score", str(self.source), "--out", str(out)]
        command += ["--text-column", "text", "--queue", QUEUE, "--redis", self.server.url, "--quiet"]
        command += ["--part-rows", "3000", "--wait", "60"]
        with (self.folder / "producer.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def unbroken(self, name: str) -> dict[str, bytes]:
        """Return the output files of a run that nothing disturbs."""
        folder = self.folder / f"unbroken-{name}"
        folder.mkdir()
        if self.start_producer(folder / name).wait(PATIENCE_S) not in ENDED:
            raise SystemExit((self.folder / "producer.log").read_text("utf-8"))
        return contents(folder)

    def run(self, name: str, kills: list[str]) -> dict[str, bytes]:
        """Return the output files of a run under ``kills``; it takes those that there is time for."""
        folder = self.folder / "disturbed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        producer = self.start_producer(folder / name)
        ends = time.monotonic() + PATIENCE_S
        while producer.poll() not in ENDED:
            if time.monotonic() > ends:
                raise SystemExit((self.folder / "producer.log").read_text("utf-8"))
            if producer.poll() is not None:
                producer = self.start_producer(folder / name)
            time.sleep(self.random.uniform(0, LATEST_S) if kills else 0.1)
            if kills and producer.poll() is None:
                self._kill(kills.pop(), producer)
        return contents(folder)

    def _kill(self, kind: str, producer: subprocess.Popen[bytes]) -> None:
        self.made[kind] += 1
        match kind:
            case "producer":
                producer.kill()
                producer.wait()
            case "worker":
                number = self.random.randrange(WORKERS)
                self.workers[number].kill()
                self.workers[number].wait()
                self.workers[number] = self._start_worker()
            case _:
                self.server.stop(signal.SIGKILL)
                if kind == "forget":
                    shutil.rmtree(self.server.folder / "appendonlydir", ignore_errors=True)
                self.server.start()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of ``folder``; a folder among them has no business there."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def endure(folder: Path, model: Path, *, rows: int, kills: list[str], seed: int) -> Counter[str]:
    """Make all ``kills`` in runs over ``rows`` rows; SystemExit if an output is wrong."""
    chaos = Chaos(folder, model, rows=rows, seed=seed)
    kills = list(kills)
    chaos.random.shuffle(kills)
    expected: dict[str, dict[str, bytes]] = {}
    try:
        while kills:
            name = NAMES[chaos.made["runs"] % len(NAMES)]
            if name not in expected:
                expected[name] = chaos.unbroken(name)
            some, kills = kills[:KILLS_PER_RUN], kills[KILLS_PER_RUN:]
            found = chaos.run(name, some)
            kills += some  # what there was no time for
            chaos.made["runs"] += 1
            if found != expected[name]:
                sizes = {file: len(data) for file, data in found.items()}
                raise SystemExit(f"{name} differs from that of an unbroken run: {sizes}")
            print(f"{name}: as unbroken, {len(kills)} kills to go, {dict(chaos.made)}", flush=True)
    finally:
        chaos.close()
    return chaos.made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    chooser = random.Random(arguments.seed)
    kills = list(KINDS)[: arguments.kills]
    kills += chooser.choices(list(KINDS), list(KINDS.values()), k=arguments.kills - len(kills))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or folder / "model"
        if not arguments.model:
            import_model(str(write_checkpoint(folder / "checkpoint", head=LABELS)), model)
        started = time.monotonic()
        made = endure(folder, model, rows=arguments.rows, kills=kills, seed=arguments.seed)
        print(f"{dict(made)} in {time.monotonic() - started:.0f} s: every output as that of an unbroken run")


if __name__ == "__main__":
    main()
