"""Timing an engine: every shape in interleaved passes, and threads against processes' worth of engines."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from gristmill.errors import InputFileError
from gristmill_worker.batching.costs import fit
from gristmill_worker.engines.base import Engine, Shape, example_inputs
from gristmill_worker.models.manifest import Tensor

OpenEngine = Callable[[int, Sequence[Shape]], Engine]  # threads, shapes
Say = Callable[[str], None]

GROUP: Final = 32  # shapes that are loaded at once: some engines keep a copy of the weights for each
RUNS_A_PASS: Final = 3  # of a shape: warm-up, after another shape, after itself
COMPARED_CORES: Final = 8  # so many copies of a model at most
CHEAP_SWITCHING: Final = 0.05  # share below which a change of shape is lost in the noise
_PROBES: Final = 6  # shapes from which the times of all others are estimated
_FIRST_PASS: Final = 0.4  # share of the time for seeing every shape once
_SEED: Final = 7
_SLOTS: Final = 3  # alternations of threads and engines
_UNDISTURBED: Final = 0.9  # share of the usual CPU time per second from which a run counts


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    cpu_s: float  # of all threads

    @property
    def cpu_share(self) -> float:
        """CPUs in use on average."""
        return self.cpu_s / self.seconds


@dataclass(slots=True)
class Timings:
    """Single runs by shape: after a run of another shape, and after one of the same."""

    switched: dict[Shape, list[Run]] = field(default_factory=dict)
    steady: dict[Shape, list[Run]] = field(default_factory=dict)
    passes: int = 0

    def seconds(self) -> dict[Shape, float]:
        """Return the median seconds of each shape as a worker meets it, which goes from shape to shape.

        Runs in a row count too where a change of shape costs nothing that could be seen.
        """
        cheap = all((self.switching(alone=alone) or 0.0) < CHEAP_SWITCHING for alone in (True, False))
        usual = self._usual_share()
        return {
            shape: _median_s([*runs, *self.steady[shape]] if cheap else runs, usual)
            for shape, runs in self.switched.items()
        }

    def runs(self, shape: Shape) -> int:
        """Return how often ``shape`` was timed."""
        return len(self.switched[shape]) + len(self.steady[shape])

    def switching(self, *, alone: bool) -> float | None:
        """Return the median share that a change of shape adds to batches of one, or to larger ones."""
        usual = self._usual_share()
        shares = [
            _median_s(runs, usual) / _median_s(self.steady[shape], usual) - 1.0
            for shape, runs in self.switched.items()
            if (shape[0] == 1) is alone
        ]
        return median(shares) if shares else None

    def _usual_share(self) -> float:
        """Return the CPUs that undisturbed runs had: the median over the shapes of the best run's."""
        return median(
            max(run.cpu_share for run in (*runs, *self.steady[shape]))
            for shape, runs in self.switched.items()
        )


def _median_s(runs: Sequence[Run], usual_share: float) -> float:
    """Return the median seconds of the runs that had the CPUs to themselves, as far as can be told.

    Another process on the same core shows as CPU time that this process did not get. If all runs were
    disturbed, their CPU time tells how long they would have taken.
    """
    alone = [run.seconds for run in runs if run.cpu_share >= _UNDISTURBED * usual_share]
    return median(alone or [run.cpu_s / usual_share for run in runs])


@dataclass(frozen=True, slots=True)
class ThreadRow:
    """One shape on the same cores: an engine of one thread on each, and one engine of a thread on each."""

    shape: Shape
    single_s: float  # of one batch
    wide_s: float
    singles_per_s: float  # texts on all cores
    wide_per_s: float


@contextmanager
def bound(cores: Sequence[int]) -> Iterator[None]:
    """Keep this thread, and those that it starts, on ``cores``; raise InputFileError if it may not."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        raise InputFileError(
            f"the cores {list(cores)} cannot be used ({error}); this process may use {sorted(before)}"
        ) from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def informative_order(shapes: Sequence[Shape]) -> list[Shape]:
    """Return ``shapes`` from coarse to fine: the corners of the grid first, then what lies between."""
    batches = _levels(sorted({batch for batch, _ in shapes}))
    sequences = _levels(sorted({sequence for _, sequence in shapes}))

    def coarseness(shape: Shape) -> tuple[int, int, Shape]:
        levels = batches[shape[0]], sequences[shape[1]]
        return max(levels), sum(levels), shape

    return sorted(shapes, key=coarseness)


def _levels(values: Sequence[int]) -> dict[int, int]:
    """Return how often the range has to be halved until each value is met; both ends are at 0."""
    levels = {0: 0, len(values) - 1: 0}
    level = 0
    while len(levels) < len(values):
        level += 1
        known = sorted(levels)
        for left, right in pairwise(known):
            if right - left > 1:
                levels[(left + right) // 2] = level
    return {values[at]: level for at, level in levels.items()}


def measure(
    open_engine: OpenEngine,
    inputs: Sequence[Tensor],
    candidates: Sequence[Shape],
    *,
    threads: int,
    seconds: float,
    say: Say,
) -> Timings:
    """Time as many of ``candidates`` as ``seconds`` allow, the most informative first.

    A few shapes tell how long the others will take. Those that fit in are then run in groups, pass after
    pass until the time is over: each pass sees every shape, so that what disturbs the machine for a while
    disturbs all of them. Within a pass, each group is shuffled and every shape run twice in a row.
    """
    ends = time.monotonic() + seconds
    order = informative_order(candidates)
    timings = Timings()
    rng = random.Random(_SEED)  # noqa: S311 - an order of measurements

    def run(group: Sequence[Shape]) -> float:
        started = time.monotonic()
        with closing(open_engine(threads, group)) as engine:
            _time(engine, inputs, rng.sample(group, len(group)), timings)
        return time.monotonic() - started

    say(f"probing {min(_PROBES, len(order))} shapes")
    run(order[:_PROBES])
    estimate = fit(timings.seconds(), order).seconds
    groups = _affordable(order, estimate, (ends - time.monotonic()) * _FIRST_PASS / RUNS_A_PASS)
    total = sum(map(len, groups))
    durations = [sum(estimate[shape] for shape in group) * RUNS_A_PASS for group in groups]
    turn = 1  # the probes had their first
    while turn < len(groups) or time.monotonic() + durations[turn % len(groups)] < ends:
        say(f"measuring {total} of {len(order)} shapes, pass {turn // len(groups) + 1}")
        durations[turn % len(groups)] = run(groups[turn % len(groups)])
        turn += 1
    timings.passes = turn // len(groups)
    return timings


def _affordable(order: Sequence[Shape], estimate: Mapping[Shape, float], seconds: float) -> list[list[Shape]]:
    """Return the shapes of ``order`` that run once in ``seconds``, in groups; the probes in any case."""
    chosen = list(order[:_PROBES])
    for shape in order[_PROBES:]:
        seconds -= estimate[shape]
        if seconds > 0:
            chosen.append(shape)
    return [chosen[:_PROBES], *(chosen[at : at + GROUP] for at in range(_PROBES, len(chosen), GROUP))]


def _time(engine: Engine, inputs: Sequence[Tensor], shapes: Sequence[Shape], timings: Timings) -> None:
    for shape in shapes:
        example = example_inputs(inputs, shape)
        for runs in (timings.switched, timings.steady):
            cpu, started = time.process_time(), time.perf_counter()
            engine.run(example)
            seconds = time.perf_counter() - started
            runs.setdefault(shape, []).append(Run(seconds, time.process_time() - cpu))


def compare_threads(
    open_engine: OpenEngine,
    inputs: Sequence[Tensor],
    shapes: Sequence[Shape],
    cores: Sequence[int],
    *,
    seconds: float,
    say: Say,
) -> list[ThreadRow]:
    """Compare an engine of one thread on each core with one engine of as many threads, in turns."""
    say(f"comparing {len(cores)} engines of one thread with one of {len(cores)} threads")
    slot_s = seconds / (len(shapes) * _SLOTS * 2)
    rows = []
    with ExitStack() as stack:
        singles = []
        for core in cores:
            with bound([core]):
                singles.append(stack.enter_context(closing(open_engine(1, shapes))))
        with bound(cores):
            wide = stack.enter_context(closing(open_engine(len(cores), shapes)))
        pool = stack.enter_context(ThreadPoolExecutor(len(cores)))
        for shape in shapes:
            rates: tuple[list[float], list[float]] = ([], [])
            for _ in range(_SLOTS):
                jobs = [
                    pool.submit(_runs_per_s, engine, inputs, shape, [core], slot_s)
                    for engine, core in zip(singles, cores, strict=True)
                ]
                rates[0].append(sum(job.result() for job in jobs))
                rates[1].append(_runs_per_s(wide, inputs, shape, cores, slot_s))
            single, all_threads = median(rates[0]), median(rates[1])
            rows.append(
                ThreadRow(
                    shape, len(cores) / single, 1 / all_threads, single * shape[0], all_threads * shape[0]
                )
            )
    return rows


def _runs_per_s(
    engine: Engine, inputs: Sequence[Tensor], shape: Shape, cores: Sequence[int], slot_s: float
) -> float:
    example = example_inputs(inputs, shape)
    with bound(cores):
        engine.run(example)
        started = time.perf_counter()
        runs = 0
        while (elapsed := time.perf_counter() - started) < slot_s or not runs:
            engine.run(example)
            runs += 1
    return runs / elapsed
