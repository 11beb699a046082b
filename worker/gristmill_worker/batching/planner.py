"""Which requests run together, in which shape. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gristmill_worker.engines.base import Shape

_Choice = tuple[int, float, Shape]  # batch size, cost of one batch, its shape


@dataclass(frozen=True, slots=True)
class Batch:
    """``items`` are indices into the planned window, at most ``shape[0]`` of them."""

    items: tuple[int, ...]
    shape: Shape


class Planner:
    """Plans windows for one set of shapes and costs. Immutable: all that windows share is computed here.

    ``cost`` is the time of one batch of each shape, in any unit.
    """

    def __init__(self, shapes: Sequence[Shape], cost: Mapping[Shape, float]) -> None:
        sequences = sorted({sequence for _, sequence in shapes})
        self.max_length: Final = sequences[-1]
        self._choices: Final[list[tuple[_Choice, ...]]] = []  # by an item's length, which starts at 0
        self._alone: Final[list[Batch]] = []
        for sequence in sequences:
            choices = _choices(shapes, cost, sequence)
            alone = Batch((0,), min(choices, key=lambda choice: choice[1])[2])
            lengths = range(len(self._choices), sequence + 1)
            self._choices.extend(choices for _ in lengths)
            self._alone.extend(alone for _ in lengths)

    def plan(self, lengths: Sequence[int], deadlines: Sequence[float] | None = None) -> list[Batch]:
        """Return the batches of least total cost that hold every item once, in the order to run them.

        ``lengths`` are the items' sizes along the sequence dimension, in order of age. The batch with the
        earliest of ``deadlines`` (any clock; inf for none) comes first, then the one with the oldest item.
        Raises ValueError for an item that fits no shape.

        Method: sorted by length, an optimal partition is contiguous (a longer item never makes a shorter
        one's batch cheaper), so a dynamic programme over prefixes finds it. A batch takes all items before
        its longest one that it has room for: leaving some out is never cheaper.
        """
        if not lengths:
            return []
        if (longest := max(lengths)) > self.max_length:
            raise ValueError(f"no shape holds an item of length {longest}")
        if len(lengths) == 1:
            return [self._alone[lengths[0]]]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        batches = []
        end = len(order)
        held_by = self._cheapest([lengths[item] for item in order])
        while end > 0:
            shape = held_by[end - 1]
            start = max(0, end - shape[0])
            batches.append(Batch(tuple(sorted(order[start:end])), shape))
            end = start
        if deadlines is None:
            return sorted(batches, key=lambda batch: batch.items[0])
        return sorted(batches, key=lambda batch: (min(deadlines[i] for i in batch.items), batch.items[0]))

    def _cheapest(self, ascending: Sequence[int]) -> list[Shape]:
        """Return the shape that holds item i where the items up to i are batched at the least cost."""
        best = [0.0]  # best[i]: least cost of the first i items
        held_by: list[Shape] = []
        shape: Shape = (0, 0)
        for end, length in enumerate(ascending, 1):
            least = math.inf
            for batch, price, candidate in self._choices[length]:
                total = price + best[end - batch] if batch < end else price
                if total < least:
                    least, shape = total, candidate
            best.append(least)
            held_by.append(shape)
        return held_by


def plan(lengths: Sequence[int], shapes: Sequence[Shape], cost: Mapping[Shape, float]) -> list[Batch]:
    """Plan one window; see :meth:`Planner.plan`."""
    return Planner(shapes, cost).plan(lengths) if lengths else []


def _choices(shapes: Sequence[Shape], cost: Mapping[Shape, float], sequence: int) -> tuple[_Choice, ...]:
    """Return the shapes that hold ``sequence``, without those that a larger and no dearer batch replaces."""
    fitting = [(batch, cost[batch, other], (batch, other)) for batch, other in shapes if other >= sequence]
    kept: list[_Choice] = []
    for choice in sorted(fitting, key=lambda choice: (-choice[0], choice[1], choice[2])):
        if not kept or choice[1] < kept[-1][1]:
            kept.append(choice)
    return tuple(reversed(kept))
