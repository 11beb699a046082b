"""Task ``text-classification``: labels and scores per text or pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gristmill_worker.engines.base import Array, Shape
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.tasks.base import Encoded, ItemError, Task
from gristmill_worker.tasks.text import TextEncoder
from gristmill_worker.tasks.values import finite_rows, invalid_output

# top_k: how many labels, the best first; null: all of them
OPTION_CHECKS: Final = {"top_k": lambda value: value is None or (type(value) is int and value > 0)}


class TextClassification:
    """See :class:`~gristmill_worker.tasks.base.Task`; a value is [{"label", "score"}, …], the best first."""

    def __init__(self, model_dir: Path, manifest: Manifest, *, truncate: bool) -> None:
        self._encoder = TextEncoder(model_dir, manifest, OPTION_CHECKS, truncate=truncate)
        self._output = manifest.outputs[0].name
        self._labels = manifest.labels or ()
        self._activate = _sigmoid if manifest.activation == "sigmoid" else _softmax

    def encode(self, bodies: Sequence[Mapping[str, Any]]) -> list[Encoded | ItemError]:
        return self._encoder.encode(bodies)

    def assemble(self, items: Sequence[Encoded], shape: Shape) -> dict[str, Array]:
        return self._encoder.assemble(items, shape)

    def decode(self, outputs: Mapping[str, Array], items: Sequence[Encoded]) -> list[Any]:
        scores = self.scores(outputs, items)
        order = np.argsort(-scores, axis=1, kind="stable")  # (items, labels)
        return [
            self._value(row, best[: item.options.get("top_k", 1)]) if good else invalid_output()
            for row, best, item, good in zip(scores, order, items, finite_rows(scores), strict=True)
        ]

    def scores(self, outputs: Mapping[str, Array], items: Sequence[Encoded]) -> Array:
        """Return the probabilities in the manifest's order of labels, float64 (items, labels)."""
        logits = outputs[self._output][: len(items)]  # (items, labels)
        return self._activate(logits.astype(np.float64))

    def _value(self, scores: Array, best: Array) -> list[dict[str, Any]]:
        return [{"label": self._labels[i], "score": round(float(scores[i]), 6)} for i in best.tolist()]


def _softmax(logits: Array) -> Array:
    with np.errstate(invalid="ignore"):  # NaN is found later, row by row
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores: Array = powers / powers.sum(axis=1, keepdims=True)
    return scores


def _sigmoid(logits: Array) -> Array:
    with np.errstate(over="ignore"):
        scores: Array = 1.0 / (1.0 + np.exp(-logits))
    return scores


def make(model_dir: Path, manifest: Manifest, *, truncate: bool) -> Task:
    """Return the task for one model directory."""
    return TextClassification(model_dir, manifest, truncate=truncate)
