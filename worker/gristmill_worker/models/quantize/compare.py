"""A new form beside the reference: answers, neighbours, size and speed, as measured."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from gristmill_worker.engines.base import Shape
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models.answers import Answer, Answers
from gristmill_worker.models.batch_run import run_items, shapes_for
from gristmill_worker.models.speed import speedup
from gristmill_worker.tasks.base import Encoded
from gristmill_worker.tune.measure import bound

BATCH: Final = 8
_TIMED: Final[Sequence[Shape]] = ((1, 16), (1, 128), (8, 128))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One variant of a form against the reference in onnxruntime, on texts that it was not made with.

    Differences are as :meth:`Answers.difference` says.
    """

    variant: Variant
    texts: int
    worst: float
    mean: float  # of texts alone
    neighbours: float  # the worst of a text among others to the same text alone
    same_label: float | None  # share; None for embeddings
    speedups: Mapping[Shape, float]  # one thread, the reference = 1


class Reference:
    """The reference's answers, computed once, and its engine to be timed beside others."""

    def __init__(self, variant: Variant, answers: Answers, items: Sequence[Encoded], threads: int) -> None:
        self._variant = variant
        self._answers = answers
        self._items = items
        self._threads = threads
        self._expected = self._run(variant, 1)

    def compare(self, variant: Variant) -> Comparison:
        """Run ``variant`` on the same texts, alone and in batches, and time it.

        Raises ModelRefusedError and EngineError.
        """
        alone, mixed = self._run(variant, 1), self._run(variant, BATCH)
        differences = self._answers.differences(alone, self._expected)
        return Comparison(
            variant=variant,
            texts=len(self._items),
            worst=max(*differences, *self._answers.differences(mixed, self._expected)),
            mean=fmean(differences),
            neighbours=max(self._answers.differences(mixed, alone)),
            same_label=self._answers.same_label(alone, self._expected),
            speedups=_speedups(self._variant, variant),
        )

    def _run(self, variant: Variant, batch: int) -> list[Answer]:
        shapes = shapes_for(self._items, batch)
        with closing(variant.load(shapes, self._threads, memory_mb=0)) as engine:
            return run_items(engine, self._answers.task, self._items, self._answers.read)


def _speedups(reference: Variant, variant: Variant) -> dict[Shape, float]:
    """Return how many times faster ``variant`` is at each shape, on one core."""
    inputs, limit = variant.manifest.inputs, variant.manifest.max_length
    shapes = list(dict.fromkeys((batch, min(length, limit)) for batch, length in _TIMED))
    with ExitStack() as stack:
        stack.enter_context(bound(sorted(os.sched_getaffinity(0))[:1]))
        before, after = (stack.enter_context(closing(each.load(shapes, 1))) for each in (reference, variant))
        return {shape: speedup(before, after, inputs, shape, 1) for shape in shapes}
