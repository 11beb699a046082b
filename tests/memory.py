"""Measure what requests and results cost in Redis, and that nothing of them is left: print a table.

Usage: python tests/memory.py [--requests 20000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

from redis import Redis

from gristmill import Client, Result, keys
from gristmill.embedded import PrivateRedis
from gristmill_worker.sources.base import Outcome
from gristmill_worker.sources.streams import StreamSource

QUEUE = "memory"
TEXT = "The miller grinds the corn while the water turns the wheel, day and night, all the year round."
VALUE = [{"label": "positive", "score": 0.987654321}]
KEPT_S = 5  # the results' time to live


@dataclass(frozen=True)
class Level:
    """What Redis holds at one moment; bytes are above the start, for each request."""

    moment: str
    keys: int
    bytes: float


def measure(url: str, count: int) -> list[Level]:
    """Take ``count`` requests of 94 characters through their life, of which a third have each priority."""
    levels: list[Level] = []
    with Redis.from_url(url, protocol=2) as redis, Client(url) as client:
        source = StreamSource(url, QUEUE, "w0", lease_s=30.0, result_ttl_s=KEPT_S)
        _life(client, source, 100)  # what stays for good: streams, groups, scripts, connections
        time.sleep(KEPT_S + 1)
        start = _used(redis)

        def look(moment: str) -> None:
            used = _used(redis)
            levels.append(Level(moment, used[0], (used[1] - start[1]) / count))

        look("before")
        _submit(client, count)
        look("waiting")
        window = [each for _ in range(count // 1000 + 16) for each in source.take(1000, 0.01)]
        look("pending")
        for at in range(0, count, 250):
            part = window[at : at + 250]
            results = [_result(each.fields[b"id"].decode()) for each in part]
            source.finish([Outcome(*pair) for pair in zip(part, results, strict=True)])
        look("results kept")
        time.sleep(KEPT_S + 1)
        look("results expired")
        source.leave()
    return levels


def _life(client: Client, source: StreamSource, count: int) -> None:
    ids = _submit(client, count)
    window = [each for _ in range(16) for each in source.take(count, 0.01)]
    source.finish([Outcome(*pair) for pair in zip(window, map(_result, ids), strict=True)])
    source.finish([])


def _submit(client: Client, count: int) -> Sequence[str]:
    ids: list[str] = []
    for i, priority in enumerate(keys.PRIORITIES):
        part = (count + i) // len(keys.PRIORITIES)
        ids += client.submit_many(QUEUE, [TEXT] * part, priority=priority, reply=False)
    return ids


def _result(request_id: str) -> Result:
    return Result(
        request_id,
        "ok",
        VALUE,
        model="sentiment@1f2e3d4c5b6a",
        worker="host-4711-9f3c",
        tokens=24,
        timing_ms={"queued": 1.234, "encode": 0.123, "run": 6.345},
        batch={"size": 32, "shape": [32, 32]},
    )


def _used(redis: Redis) -> tuple[int, int]:
    for _ in range(3):  # expired keys are removed a few at a time; a look at each removes it
        redis.keys("*")
        time.sleep(0.2)
    return redis.dbsize(), int(redis.execute_command("INFO", "memory")["used_memory"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    count = parser.parse_args().requests
    with PrivateRedis() as redis:
        levels = measure(redis.url, count)
    print(f"{count} requests with {len(TEXT)} characters each\n{'':<16s}    keys  bytes a request")
    for level in levels:
        print(f"{level.moment:<16s} {level.keys:>7d}  {level.bytes:15.0f}")


if __name__ == "__main__":
    main()
