"""Measure what comes of texts that repeat: print the rate of one worker on one CPU, and what it did not run.

Usage: python tests/repeats.py MODEL [--requests 2000] [--texts 1000] [--core 0]

The texts are paragraphs of Python's documentation. How often each comes follows Zipf's law: the k-th most
frequent one comes 1/k as often as the first.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from gristmill_worker.bench.rig import Rig
from gristmill_worker.models.documentation import documentation

WINDOW = 1024  # requests in flight
SEED = 7


def zipf(texts: Sequence[str], count: int) -> list[str]:
    """Draw ``count`` texts."""
    weights = [1 / rank for rank in range(1, len(texts) + 1)]
    return random.Random(SEED).choices(texts, weights, k=count)


def measure(rig: Rig, name: str, drawn: Sequence[str], model: Path, core: int, cache_mb: float) -> None:
    """Score ``drawn`` through a worker of its own, and print one row."""
    with rig.worker(name, core, model=model, result_cache_mb=cache_mb) as worker:
        rig.client.score_many(name, [f"warm up {i}" for i in range(64)], timeout_s=120)
        worker.counters(64)
        cpu_s, started = worker.cpu_s(), time.perf_counter()
        results = list(rig.client.as_completed(name, drawn, window=WINDOW, timeout_s=120))
        seconds = time.perf_counter() - started
        cpu_s = worker.cpu_s() - cpu_s
        counted = worker.counters(64 + len(drawn))
    for _, result in results:
        result.unwrap()
    ran = len(drawn) - counted["deduplicated"] - counted["cache_hits"]
    rate, cpu_ms = len(drawn) / seconds, cpu_s * 1000 / len(drawn)
    print(
        f"| {name} | {rate:,.0f} | {cpu_ms:.2f} | {counted['deduplicated']:,} "
        f"| {counted['cache_hits']:,} | {ran:,} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--core", type=int, default=0)
    asked = parser.parse_args()
    texts = list(islice(documentation(), asked.texts))
    drawn = zipf(texts, asked.requests)
    numbered = [f"{text} {i}" for i, text in enumerate(drawn)]  # as before, and none comes twice
    print(f"{asked.requests:,} requests for {len(set(drawn)):,} different texts")
    print("| | requests/s | worker's CPU, ms a request | deduplicated | from the cache | ran |")
    print("|---|---|---|---|---|---|")
    with Rig() as rig:
        measure(rig, "all-different", numbered, asked.model, asked.core, 0)
        measure(rig, "repeating", drawn, asked.model, asked.core, 0)
        measure(rig, "repeating-cached", drawn, asked.model, asked.core, 64)


if __name__ == "__main__":
    main()
