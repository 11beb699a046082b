"""A new form beside the reference: answers, neighbours, size and speed, as measured."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median
from typing import Final

from gristmill_worker.engines.base import Array, Engine, Shape, example_inputs
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models.quantize.answers import (
    Vectors,
    cosines,
    engine_answers,
    labels_of,
    shapes_for,
)
from gristmill_worker.tasks.base import Encoded, Task
from gristmill_worker.tune.measure import bound

BATCH: Final = 8
_TIMED: Final[Sequence[Shape]] = ((1, 16), (1, 128), (8, 128))
_ROUNDS: Final = 7
_SLOT_S: Final = 0.1  # of one form in one round, or one run


@dataclass(frozen=True, slots=True)
class Comparison:
    """One variant of a form against the reference in onnxruntime, on texts that it was not made with."""

    variant: Variant
    texts: int
    mean_cosine: float
    min_cosine: float
    neighbours: float  # min cosine of a text among others to the same text alone
    same_label: float | None  # share; None for embeddings
    speedups: Mapping[Shape, float]  # one thread, the reference = 1


class Reference:
    """The reference's answers, computed once, and its engine to be timed beside others."""

    def __init__(self, variant: Variant, task: Task, items: Sequence[Encoded], threads: int) -> None:
        self._variant = variant
        self._task = task
        self._items = items
        self._threads = threads
        self._answers = self._run(variant, items, 1)

    def compare(self, variant: Variant) -> Comparison:
        """Run ``variant`` on the same texts, alone and in batches, and time it. Raises ModelRefusedError."""
        alone = self._run(variant, self._items, 1)
        mixed = self._run(variant, self._items, BATCH)
        to_reference = cosines(alone, self._answers)
        embeddings = variant.manifest.task == "embeddings"
        same = labels_of(alone) == labels_of(self._answers)
        return Comparison(
            variant=variant,
            texts=len(self._items),
            mean_cosine=float(to_reference.mean()),
            min_cosine=float(min(to_reference.min(), cosines(mixed, self._answers).min())),
            neighbours=float(cosines(mixed, alone).min()),
            same_label=None if embeddings else float(same.mean()),
            speedups=_speedups(self._variant, variant),
        )

    def _run(self, variant: Variant, items: Sequence[Encoded], batch: int) -> Vectors:
        manifest = variant.manifest
        shapes = shapes_for(items, manifest.max_length, batch)
        with closing(variant.load(shapes, self._threads, memory_mb=0)) as engine:
            return engine_answers(engine, manifest, self._task, items, batch)


def _speedups(reference: Variant, variant: Variant) -> dict[Shape, float]:
    """Return how many times faster ``variant`` is at each shape, by the medians of alternating runs."""
    limit = variant.manifest.max_length
    shapes = list(dict.fromkeys((batch, min(length, limit)) for batch, length in _TIMED))
    found = {}
    with ExitStack() as stack:
        stack.enter_context(bound(sorted(os.sched_getaffinity(0))[:1]))
        engines = [stack.enter_context(closing(each.load(shapes, 1))) for each in (reference, variant)]
        for shape in shapes:
            inputs = example_inputs(variant.manifest.inputs, shape)
            rounds = [[_seconds(engine, inputs) for engine in engines] for _ in range(_ROUNDS)]
            before, after = (median(times) for times in zip(*rounds, strict=True))
            found[shape] = before / after
    return found


def _seconds(engine: Engine, inputs: Mapping[str, Array]) -> float:
    started, runs = time.perf_counter(), 0
    while runs == 0 or time.perf_counter() - started < _SLOT_S:
        engine.run(inputs)
        runs += 1
    return (time.perf_counter() - started) / runs
