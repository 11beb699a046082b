"""Magnitude pruning of weight matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gristmill_worker.models.manifest import ModelRefusedError

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Pruning:
    """Which weights of each matrix become zero: the ``share`` of least magnitude.

    ``block`` weights of one output, at neighbouring inputs, go together: VNNI multiplies four at once.
    """

    share: float = 0.0
    block: int = 4

    def apply(self, weight: Floats) -> Floats:
        """Return the pruned matrix (in, out)."""
        if not self.share:
            return weight
        rows, columns = weight.shape
        if rows % self.block:
            raise ModelRefusedError(f"a matrix of {rows} inputs cannot be pruned in blocks of {self.block}")
        blocks = weight.reshape(rows // self.block, self.block, columns)
        size = np.abs(blocks).sum(axis=1)  # (blocks, out)
        gone = np.argsort(size, axis=None, kind="stable")[: round(size.size * self.share)]
        keep = np.ones(size.size, bool)
        keep[gone] = False
        return (blocks * keep.reshape(size.shape)[:, None, :]).reshape(rows, columns)
