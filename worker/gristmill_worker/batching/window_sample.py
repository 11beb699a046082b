"""Real lengths cut into windows, and what they cost in many sets of shapes at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill_worker.engines.base import Shape

Numbers = NDArray[Any]


class WindowSample:
    """Windows of up to ``window`` texts, in the order of ``lengths``; ``idle`` is the share that runs alone.

    Costs are asked for a set of shapes, ``base``, together with each of ``extras`` in turn.
    """

    def __init__(self, lengths: Sequence[int], window: int, idle: float = 0.0) -> None:
        count = len(lengths)
        if not count:
            raise ValueError("a sample of no lengths says nothing")
        size = min(window, count)
        cut = np.zeros(-(-count // size) * size, dtype=np.int64)
        cut[:count] = lengths
        # Each window ascends; a short one starts with zeros, which cost nothing.
        self._windows = np.sort(cut.reshape(-1, size), axis=1)  # (windows, size)
        self._distinct, self._counts = np.unique(np.asarray(lengths), return_counts=True)
        self._texts = count
        self._idle = idle

    def costs(self, base: Sequence[Shape], extras: Sequence[Shape], cost: Mapping[Shape, float]) -> Numbers:
        """Return the mean cost of a text with ``base`` and each of ``extras``; inf where a text fits none."""
        mean: Numbers = self.planned(base, extras, cost).sum(axis=0) / self._texts  # (extras,)
        if not self._idle:
            return mean
        alone = self._counts @ self._alone(base, extras, cost) / self._texts  # (extras,)
        weighted: Numbers = (1.0 - self._idle) * mean + self._idle * alone
        return weighted

    def planned(self, base: Sequence[Shape], extras: Sequence[Shape], cost: Mapping[Shape, float]) -> Numbers:
        """Return the least cost of every window, (windows, extras): the planner's dynamic programme."""
        windows, size = self._windows.shape
        batches = sorted({batch for batch, _ in base})
        prices = np.full((size, len(batches), windows, 1), np.inf)
        for batch, sequence in base:
            fits = (sequence >= self._windows.T)[:, :, None]
            row = prices[:, batches.index(batch)]
            row[fits] = np.minimum(row[fits], cost[batch, sequence])
        extra_batch = np.array([batch for batch, _ in extras])
        extra_sequence = np.array([sequence for _, sequence in extras])
        extra_cost = np.array([cost[shape] for shape in extras])
        # best[ahead + i]: least cost of the i shortest texts; what lies before the first costs nothing.
        ahead = max([*batches, *extra_batch])
        best = np.zeros((ahead + size + 1, windows, len(extras)))
        rows, columns = np.arange(windows)[:, None], np.arange(len(extras))
        for i in range(size):
            end = ahead + i + 1
            lengths = self._windows[:, i, None]  # (windows, 1)
            least = best[end - extra_batch, rows, columns] + np.where(
                lengths <= extra_sequence, extra_cost, np.inf
            )  # (windows, extras)
            for at, batch in enumerate(batches):
                np.minimum(least, best[end - batch] + prices[i, at], out=least)
            best[end] = np.where(lengths > 0, least, 0.0)
        planned: Numbers = best[-1]
        return planned

    def _alone(self, base: Sequence[Shape], extras: Sequence[Shape], cost: Mapping[Shape, float]) -> Numbers:
        """Return the cost of every distinct length in a batch of its own, (lengths, extras)."""
        lengths = self._distinct[:, None]  # (lengths, 1)
        least: Numbers = np.where(
            lengths <= [sequence for _, sequence in extras], [cost[shape] for shape in extras], np.inf
        )
        for shape in base:
            least = np.minimum(least, np.where(lengths <= shape[1], cost[shape], np.inf))
        return least
