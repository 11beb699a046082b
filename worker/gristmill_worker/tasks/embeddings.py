"""Task ``embeddings``: one vector per text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gristmill_worker.engines.base import Array, Shape
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.tasks.base import Encoded, ItemError, Task
from gristmill_worker.tasks.text import TextEncoder, attended
from gristmill_worker.tasks.values import ENCODINGS, finite_rows, invalid_output, to_value

OPTION_CHECKS: Final = {"encoding": lambda value: value in ENCODINGS}


class Embeddings:
    """See :class:`~gristmill_worker.tasks.base.Task`; a value is a list of floats, or base64 float32."""

    def __init__(self, model_dir: Path, manifest: Manifest, *, truncate: bool) -> None:
        self._encoder = TextEncoder(model_dir, manifest, OPTION_CHECKS, truncate=truncate)
        self._manifest = manifest

    def encode(self, bodies: Sequence[Mapping[str, Any]]) -> list[Encoded | ItemError]:
        return self._encoder.encode(bodies)

    def assemble(self, items: Sequence[Encoded], shape: Shape) -> dict[str, Array]:
        return self._encoder.assemble(items, shape)

    def decode(self, outputs: Mapping[str, Array], items: Sequence[Encoded]) -> list[Any]:
        vectors = self.vectors(outputs, items)
        return [
            to_value(row, item.options.get("encoding", "json")) if good else invalid_output()
            for row, item, good in zip(vectors, items, finite_rows(vectors), strict=True)
        ]

    def vectors(self, outputs: Mapping[str, Array], items: Sequence[Encoded]) -> Array:
        """Pool and normalise as the manifest says; returns float32 (items, hidden)."""
        hidden = outputs[self._manifest.outputs[0].name][: len(items)].astype(np.float32, copy=False)
        if hidden.ndim == 3:  # (items, sequence, hidden); a graph that pools itself gives (items, hidden)
            hidden = self._pool(hidden, attended(items, hidden.shape[1]))
        if self._manifest.normalize:
            norms = np.linalg.norm(hidden, axis=1, keepdims=True)
            hidden = hidden / np.maximum(norms, 1e-12)
        return hidden

    def _pool(self, hidden: Array, mask: Array) -> Array:
        match self._manifest.pooling:
            case "cls":
                return hidden[:, 0]
            case "max":
                pooled: Array = np.where(mask[:, :, None], hidden, -np.inf).max(axis=1)
                return pooled
            case _:
                weights = mask.astype(np.float32)
                summed: Array = np.einsum("bsh,bs->bh", hidden, weights, optimize=False)
                mean: Array = summed / weights.sum(axis=1, keepdims=True)
                return mean


def make(model_dir: Path, manifest: Manifest, *, truncate: bool) -> Task:
    """Return the task for one model directory."""
    return Embeddings(model_dir, manifest, truncate=truncate)
