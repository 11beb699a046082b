"""How many times faster one engine is than another."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from gristmill_worker.engines.base import Array, Engine, Shape, example_inputs
from gristmill_worker.models.manifest import Tensor

_ROUNDS: Final = 7  # one engine and the other in turns
_SLOT_S: Final = 0.03  # of one engine in one round, or one run


def speedup(reference: Engine, engine: Engine, inputs: Sequence[Tensor], shape: Shape, threads: int) -> float:
    """Return the median time of ``reference`` at ``shape`` over that of ``engine``.

    On one thread CPU time is taken, which other processes disturb less.
    """
    example = example_inputs(inputs, shape)
    rounds = [[_seconds(each, example, threads) for each in (reference, engine)] for _ in range(_ROUNDS)]
    before, after = zip(*rounds, strict=True)
    return float(median(before) / median(after))


def _seconds(engine: Engine, inputs: Mapping[str, Array], threads: int) -> float:
    clock = time.process_time if threads == 1 else time.perf_counter
    engine.run(inputs)  # the caches hold what the other one used
    runs, ends, started = 0, time.perf_counter() + _SLOT_S, clock()
    while runs == 0 or time.perf_counter() < ends:
        engine.run(inputs)
        runs += 1
    return (clock() - started) / runs
