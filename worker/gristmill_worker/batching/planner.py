"""Which requests run together, in which shape. Pure: no clock, no I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gristmill_worker.engines.base import Shape


@dataclass(frozen=True, slots=True)
class Batch:
    """``items`` are indices into the planned window, at most ``shape[0]`` of them."""

    items: tuple[int, ...]
    shape: Shape


def plan(lengths: Sequence[int], shapes: Sequence[Shape], cost: Mapping[Shape, float]) -> list[Batch]:
    """Return the batches of least total ``cost`` that hold every item once, the oldest item's batch first.

    ``lengths`` are the items' sizes along the sequence dimension, in order of age; ``cost`` is the time of
    one batch of each shape. Sorted by length, an optimal partition is contiguous (a longer item never makes a
    shorter one's batch cheaper), so a dynamic programme over prefixes finds it. Raises ValueError for an item
    that fits no shape.
    """
    choices = _Choices(shapes, cost)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best = [0.0]  # best[i]: least cost of the i shortest items
    last: list[Shape] = []  # last[i - 1]: the shape that holds item i there
    for count, item in enumerate(order, 1):
        # A batch of b takes all b items before it if there are so many: fewer would never be cheaper.
        total, shape = min(
            (best[max(0, count - batch)] + price, shape)
            for batch, price, shape in choices.fitting(lengths[item])
        )
        best.append(total)
        last.append(shape)
    batches = []
    end = len(order)
    while end > 0:
        start = max(0, end - last[end - 1][0])
        batches.append(Batch(tuple(sorted(order[start:end])), last[end - 1]))
        end = start
    return sorted(batches, key=lambda batch: batch.items[0])


class _Choices:
    """For each length, the cheapest shape of every batch size."""

    def __init__(self, shapes: Sequence[Shape], cost: Mapping[Shape, float]) -> None:
        self._sequences = sorted({sequence for _, sequence in shapes})
        self._fitting: list[list[tuple[int, float, Shape]]] = []
        for smallest in self._sequences:
            cheapest: dict[int, tuple[float, Shape]] = {}
            for shape in shapes:
                if shape[1] >= smallest:
                    offer = (cost[shape], shape)
                    cheapest[shape[0]] = min(offer, cheapest.get(shape[0], offer))
            self._fitting.append([(batch, *offer) for batch, offer in cheapest.items()])

    def fitting(self, length: int) -> list[tuple[int, float, Shape]]:
        """Return (batch, cost, shape) of the shapes that hold an item of ``length``."""
        at = bisect_left(self._sequences, length)
        if at == len(self._sequences):
            raise ValueError(f"no shape holds an item of length {length}")
        return self._fitting[at]
