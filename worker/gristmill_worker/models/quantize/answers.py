"""What a model answers to texts, as one vector a text, and how alike two sets of answers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gristmill_worker.engines.base import Array, Engine, Shape
from gristmill_worker.models.inspect_onnx import Probe
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.tasks.base import Encoded, Task
from gristmill_worker.tasks.embeddings import Embeddings

Vectors = NDArray[np.float32]  # (texts, hidden) or (texts, labels)

_STEP: Final = 16  # lengths are rounded up to multiples of it, so that there are few shapes


def probe_answers(probe: Probe, manifest: Manifest, task: Task, items: Sequence[Encoded]) -> Vectors:
    """Return the answers to ``items``, each run alone and without padding."""
    names = [tensor.name for tensor in manifest.outputs]
    return np.concatenate(
        [
            _vectors(probe.run(task.assemble([item], (1, item.length)), names), manifest, task, [item])
            for item in items
        ]
    )


def shapes_for(items: Sequence[Encoded], max_length: int, batch: int) -> list[Shape]:
    """Return the shapes that :func:`engine_answers` runs ``items`` in."""
    groups = (items[at : at + batch] for at in range(0, len(items), batch))
    return sorted({_shape(group, max_length, batch) for group in groups})


def engine_answers(
    engine: Engine, manifest: Manifest, task: Task, items: Sequence[Encoded], batch: int
) -> Vectors:
    """Return the answers to ``items``, run in their order in batches of ``batch``."""
    found = []
    for at in range(0, len(items), batch):
        group = items[at : at + batch]
        outputs = engine.run(task.assemble(group, _shape(group, manifest.max_length, batch)))
        found.append(_vectors(outputs, manifest, task, group))
    return np.concatenate(found)


def cosines(found: Vectors, expected: Vectors) -> NDArray[np.float64]:
    """Return the cosine of each pair of rows, (texts,); 0 where an answer is not finite."""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    values: NDArray[np.float64] = np.einsum("ij,ij->i", a, b) / np.maximum(norms, np.finfo(np.float64).tiny)
    return np.nan_to_num(values, nan=0.0)


def labels_of(answers: Vectors) -> NDArray[np.int64]:
    """Return the best label of each row of logits; of a single logit whether it is positive."""
    best = answers[:, 0] > 0 if answers.shape[1] == 1 else answers.argmax(axis=1)
    return best.astype(np.int64)


def _vectors(outputs: dict[str, Array], manifest: Manifest, task: Task, items: Sequence[Encoded]) -> Vectors:
    if isinstance(task, Embeddings):
        return task.vectors(outputs, items)
    return outputs[manifest.outputs[0].name][: len(items)].astype(np.float32)


def _shape(items: Sequence[Encoded], max_length: int, batch: int) -> Shape:
    longest = max(item.length for item in items)
    return batch, min(-(-longest // _STEP) * _STEP, max_length)
