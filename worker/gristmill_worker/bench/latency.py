"""Latency: of an idle worker, of bursts on two workers, and of an open loop of Poisson arrivals."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import numpy as np

from gristmill import AsyncClient, Client, Result
from gristmill_worker.bench.rig import ANSWER_TIMEOUT_S, LOOK_S, Rig, Worker, check, wait_for
from gristmill_worker.bench.throughput import Amounts, Say, Subject

LOADS: Final = (0.2, 0.4, 0.6, 0.8, 0.9)  # shares of the measured capacity
BURST: Final = 64  # requests
_PAUSE_S: Final = 0.01  # between requests to an idle worker
_REST_S: Final = 0.05  # between bursts
_LEAD_S: Final = 0.05  # from making a schedule to its start
_WARM_UP: Final = 5
_SEED: Final = 11


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p95: float
    p99: float


def percentiles(values_ms: Sequence[float]) -> Percentiles:
    """Return the percentiles of ``values_ms``, interpolated linearly between the nearest two."""
    p50, p95, p99 = np.percentile(values_ms, (50, 95, 99)).tolist()
    return Percentiles(p50, p95, p99)


@dataclass(frozen=True, slots=True)
class Idle:
    """One request at a time to an idle worker with ``max_wait_ms: 0``; milliseconds.

    ``total`` is from before the submit to the result in the client's hands, ``overhead`` that minus the
    engine's run as the same result states it; ``encode`` is a part of ``overhead``.
    """

    requests: int
    total: Percentiles
    run: Percentiles
    overhead: Percentiles
    encode: Percentiles


def measure_idle(rig: Rig, subject: Subject, amounts: Amounts, say: Say) -> Idle:
    """Measure single requests with the real engine."""
    say("loading a worker with max_wait_ms: 0")
    total: list[float] = []
    results: list[Result] = []
    texts = cycle(subject.texts)
    with rig.worker("idle", subject.core, **subject.settings(max_wait_ms=0)) as worker:
        say(f"idle latency: {amounts.idle_requests} requests")
        for _ in range(_WARM_UP):
            _ask(rig.client, next(texts), subject.options, worker)
        for _ in range(amounts.idle_requests):
            time.sleep(_PAUSE_S)
            started = time.perf_counter()
            results.append(_ask(rig.client, next(texts), subject.options, worker))
            total.append((time.perf_counter() - started) * 1000)
    run = [result.timing_ms["run"] for result in results]
    return Idle(
        requests=len(results),
        total=percentiles(total),
        run=percentiles(run),
        overhead=percentiles([whole - part for whole, part in zip(total, run, strict=True)]),
        encode=percentiles([result.timing_ms["encode"] for result in results]),
    )


def _ask(client: Client, text: str, options: dict[str, Any], *workers: Worker) -> Result:
    return wait_for(client, client.submit(workers[0].queue, text, options=options), *workers)


@dataclass(frozen=True, slots=True)
class Bursts:
    """How many batches, and windows, had how many requests. A window is what a worker takes at once."""

    bursts: int
    batch_sizes: dict[int, int]
    window_sizes: dict[int, int]


def measure_bursts(rig: Rig, subject: Subject, amounts: Amounts, say: Say) -> dict[str, Bursts]:
    """Send bursts of BURST requests to two idle workers that compute nothing, one on each CPU."""
    say("loading two workers for bursts")
    text = min(subject.texts, key=len)
    settings = subject.settings() | {"engine": "null"}
    found = {}
    with (
        rig.worker("bursts", subject.core, **settings) as worker,
        rig.worker("bursts", subject.other_core, **settings) as other,
    ):
        workers = worker, other
        _ask(rig.client, text, subject.options, *workers)
        for kind in ("one submit_many", f"{BURST} submits"):
            say(f"bursts of {BURST}: {kind}")
            bursts = [_burst(rig.client, text, subject, kind, workers) for _ in range(amounts.bursts)]
            found[kind] = count_sizes(bursts)
    return found


def _burst(client: Client, text: str, subject: Subject, kind: str, workers: Sequence[Worker]) -> list[Result]:
    time.sleep(_REST_S)
    queue = workers[0].queue
    texts = [f"{text} {number}" for number in range(BURST)]  # of equal ones a worker would run one
    if kind == "one submit_many":
        ids = client.submit_many(queue, texts, options=subject.options)
    else:
        ids = [client.submit(queue, each, options=subject.options) for each in texts]
    return [wait_for(client, request_id, *workers) for request_id in ids]


def count_sizes(bursts: Sequence[Sequence[Result]]) -> Bursts:
    """Count batches and windows by size.

    A result names its batch's size. Requests of one burst were in one window if the same worker encoded them
    in the same time, to the microsecond: a window is encoded at once.
    """
    batch_requests: Counter[int] = Counter()
    window_sizes: Counter[int] = Counter()
    for results in bursts:
        batch_requests.update((result.batch or {})["size"] for result in results)
        windows = Counter((result.worker, result.timing_ms["encode"]) for result in results)
        window_sizes.update(windows.values())
    batch_sizes = {size: requests // size for size, requests in sorted(batch_requests.items())}
    return Bursts(len(bursts), batch_sizes, dict(sorted(window_sizes.items())))


@dataclass(frozen=True, slots=True)
class Load:
    """An open loop at one load: latencies in ms from the intended send time to the result at the client.

    ``late`` is how much later than intended the client sent: its own share of the latency. ``offered_per_s``
    are this schedule's arrivals, ``done_per_s`` the results between the first arrival and the last result.
    """

    load: float  # share of the capacity
    requests: int
    offered_per_s: float
    done_per_s: float
    latency: Percentiles
    late: Percentiles
    mean_batch: float  # requests of the batch that a request ran in


def poisson_schedule(rate_per_s: float, seconds: float, seed: int) -> list[float]:
    """Return arrival times within ``seconds``, ascending; the gaps are exponential with mean 1 / rate."""

    def arrivals() -> Iterator[float]:
        rng = random.Random(seed)  # noqa: S311 - arrivals, not secrets
        at = rng.expovariate(rate_per_s)
        while at < seconds:
            yield at
            at += rng.expovariate(rate_per_s)

    return list(arrivals())


def measure_open_loop(
    rig: Rig, subject: Subject, amounts: Amounts, capacity_per_s: float, say: Say
) -> list[Load]:
    """Offer each of LOADS for ``seconds_per_load``, whatever comes back and when."""
    loads = []
    say("loading a worker for the open loop")
    with rig.worker("open-loop", subject.core, **subject.settings()) as worker:
        for load in LOADS:
            rate = capacity_per_s * load
            say(f"open loop: {rate:.0f} requests/s, {load:.0%} of the capacity")
            schedule = poisson_schedule(rate, amounts.seconds_per_load, _SEED) or [0.0]
            loads.append(asyncio.run(_offer(rig.redis.url, worker, subject, schedule, load)))
    return loads


async def _offer(url: str, worker: Worker, subject: Subject, schedule: Sequence[float], load: float) -> Load:
    queue = worker.queue
    latencies: list[float] = []
    late: list[float] = []
    sizes: list[int] = []

    async def ask(client: AsyncClient, text: str, intended: float) -> None:
        late.append((time.perf_counter() - intended) * 1000)
        request_id = await client.submit(queue, text, options=subject.options)
        result = check(await client.result(request_id, ANSWER_TIMEOUT_S))
        latencies.append((time.perf_counter() - intended) * 1000)
        sizes.append((result.batch or {})["size"])

    async with AsyncClient(url, retry_s=1.0) as client:
        for _ in range(_WARM_UP):
            check(await client.result(await client.submit(queue, subject.texts[0]), ANSWER_TIMEOUT_S))
        starts = time.perf_counter() + _LEAD_S
        asked = []
        for at, text in zip(schedule, cycle(subject.texts), strict=False):
            if (delay := starts + at - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            worker.check_running()
            asked.append(asyncio.create_task(ask(client, text, starts + at)))
        results = asyncio.gather(*asked)
        while not (await asyncio.wait([results], timeout=LOOK_S))[0]:
            worker.check_running()
        await results  # raises what failed
        seconds = time.perf_counter() - starts - schedule[0]
    return Load(
        load=load,
        requests=len(schedule),
        offered_per_s=len(schedule) / max(schedule[-1], 1e-9),
        done_per_s=len(schedule) / seconds,
        latency=percentiles(latencies),
        late=percentiles(late),
        mean_batch=sum(sizes) / len(sizes),
    )
