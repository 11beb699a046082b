"""Score a large generated file and print the producer's memory on the way: ``make bulk-memory``.

Usage: python tests/bulk_memory.py [--rows 1000000] [--chars 2000] [--kind csv] [--folder DIR] [--seconds 0]

Each row has a short text to score and ``--chars`` characters to pass on. The worker's engine computes
nothing. With ``--seconds`` the producer is killed once after so long, and goes on.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil

from checkpoints import write_checkpoint
from conftest import LABELS
from gristmill.bulk.checkpoint import read_state
from gristmill_worker.models.importer import import_model

STEPS: Final = 10
WORDS: Final = (
    "mill",
    "wheel",
    "stone",
    "flour",
    "grain",
    "water",
    "river",
    "bread",
    "corn",
    "oats",
    "sack",
    "door",
)


def write_rows(path: Path, rows: int, chars: int) -> None:
    chooser = random.Random(1)
    notes = [" ".join(chooser.choices(WORDS, k=chars))[:chars] for _ in range(50)]
    with path.open("w") as file:
        file.write("id,text,note\n")
        for i in range(rows):
            file.write(f"{i},the {WORDS[i % 11]} of the {WORDS[i % 10]} turns {i},{notes[i % 50]}\n")


def watch(process: subprocess.Popen[bytes], folder: Path, rows: int, kill_at_s: float) -> int:
    """Print rows and memory until the process ends; returns the most memory that it had, in bytes."""
    there, step, peak, started = psutil.Process(process.pid), 0, 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        try:
            peak = max(peak, (now := there.memory_info().rss))
        except psutil.NoSuchProcess:
            break
        done = read_state(folder).rows if folder.exists() else 0
        seconds = time.monotonic() - started
        if done >= step * rows // STEPS:
            print(f"{done:<10,d} {now / 2**20:6.0f} MiB  {seconds:6.0f} s", flush=True)
            step = done * STEPS // rows + 1
        if 0 < kill_at_s < seconds:
            process.kill()
    process.wait()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--chars", type=int, default=2000)
    parser.add_argument("--kind", default="csv")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        import_model(str(write_checkpoint(folder / "checkpoint", head=LABELS)), folder / "model")
        source, out = folder / "in.csv", folder / f"out.{arguments.kind}"
        write_rows(source, arguments.rows, arguments.chars)
        print(f"{arguments.rows:,} rows, {source.stat().st_size / 1e9:.2f} GB", flush=True)
        command = [sys.executable, "-m", "gristmill.cli", "score", str(source), "--out", str(out)]
        command += ["--text-column", "text", "--model", str(folder / "model")]
        env = {**os.environ, "GRISTMILL_ENGINE": "null"}
        peak = 0
        for kill_at_s in [arguments.seconds, 0.0] if arguments.seconds else [0.0]:
            with subprocess.Popen(command, env=env) as process:
                found = watch(process, folder / f"{out.name}.parts", arguments.rows, kill_at_s)
                peak = max(peak, found)
        print(
            f"most memory of the producer: {peak / 2**20:.0f} MiB; output {out.stat().st_size / 1e9:.2f} GB"
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
