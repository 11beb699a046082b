"""What a model answers to items, as numbers, and how far two answers to the same item are apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from gristmill.errors import InputFileError
from gristmill_worker.engines.base import Array, Engine, Shape, concrete
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.tasks.base import Encoded, ItemError, make_task
from gristmill_worker.tasks.embeddings import Embeddings
from gristmill_worker.tasks.tensors import Tensors
from gristmill_worker.tasks.text_classification import TextClassification

Answer = tuple[Array, ...]  # one array per output; texts have one: a vector, or a probability per label

_TINY: Final = 1e-12
_SMALLEST_SCALE: Final = 1e-3  # of an output: below, float32 rounding of the sums behind it is no difference


class Answers:
    """Encodes texts and reads answers for the model of one directory, whichever form gives them."""

    def __init__(self, model_dir: Path, manifest: Manifest) -> None:
        self.manifest: Final = manifest
        self.task: Final = make_task(model_dir, manifest, truncate=True)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode ``texts``; raise :class:`InputFileError` for one that cannot be used."""
        items = []
        for text, item in zip(texts, self.task.encode([{"text": text} for text in texts]), strict=True):
            if isinstance(item, ItemError):
                raise InputFileError(f"the text {text[:60]!r} cannot be used: {item.message}")
            items.append(item)
        return items

    def run(self, engine: Engine, items: Sequence[Encoded], shape: Shape) -> list[Answer]:
        """Run ``items`` as one batch of ``shape``; spare rows repeat the first item."""
        return self.read(engine.run(self.task.assemble(items, shape)), items)

    def read(self, outputs: Mapping[str, Array], items: Sequence[Encoded]) -> list[Answer]:
        """Return the answer to each of ``items``, without their padding."""
        task = self.task
        with np.errstate(all="ignore"):  # NaN and infinity are found when answers are compared
            if isinstance(task, Embeddings):
                return [(row,) for row in task.vectors(outputs, items)]  # (hidden,)
            if isinstance(task, TextClassification):
                return [(row,) for row in task.scores(outputs, items)]  # (labels,)
            if isinstance(task, Tensors):
                return [tuple(task.arrays(outputs, i, item).values()) for i, item in enumerate(items)]
        raise TypeError(f"no answers are known for the task {self.manifest.task}")

    def difference(self, found: Answer, expected: Answer) -> float:
        """Return 0 for equal answers, and infinity where one holds NaN or infinity.

        For embeddings it is 1 - cosine, if their length is 1; of others, a difference in length counts as
        well. For classifiers it is the largest difference of a probability, for tensors the largest of a
        number relative to the largest of its output, or to .001 if that is larger.
        """
        if not all(np.isfinite(array).all() for array in (*found, *expected)):
            return float("inf")
        measure = {"embeddings": _unlikeness, "text-classification": _largest}.get(
            self.manifest.task, _relative
        )
        pairs = zip(found, expected, strict=True)
        return max(measure(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs)

    def differences(self, found: Iterable[Answer], expected: Iterable[Answer]) -> list[float]:
        """Return the :meth:`difference` of each pair."""
        return [self.difference(*pair) for pair in zip(found, expected, strict=True)]

    def same_label(self, found: Sequence[Answer], expected: Sequence[Answer]) -> float | None:
        """Return the share of pairs with one best label; None for a model without labels.

        Of a single label it is whether it applies.
        """
        if not self.manifest.labels or not found:
            return None
        return sum(_label(a) == _label(b) for (a,), (b,) in zip(found, expected, strict=True)) / len(found)


def _label(scores: Array) -> int:
    return int(scores[0] > 0.5) if len(scores) == 1 else int(scores.argmax())


def _unlikeness(found: Array, expected: Array) -> float:
    """|a - b|^2 / (|a|^2 + |b|^2), which is 1 - cosine where both are of one length."""
    total = float((found**2).sum() + (expected**2).sum())
    return float(((found - expected) ** 2).sum()) / max(total, _TINY)


def _largest(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max(initial=0.0))


def _relative(found: Array, expected: Array) -> float:
    return _largest(found, expected) / max(float(np.abs(expected).max(initial=0.0)), _SMALLEST_SCALE)


def cut(item: Encoded, length: int) -> Encoded:
    """Return ``item``, a single text, with its first tokens and its last one, ``length`` in all."""
    ids = item.arrays["input_ids"]  # (length,)
    if item.length <= length:
        return item
    return Encoded(length, {"input_ids": np.concatenate([ids[: length - 1], ids[-1:]])}, {})


def random_item(manifest: Manifest, length: int, random: np.random.Generator) -> Encoded:
    """Return an item of raw tensors: normal floats, integers of 0 and 1 (which every import has tried)."""
    arrays = {}
    for tensor in manifest.inputs:
        shape = concrete(tensor, (1, length))[1:]
        if "mask" in tensor.name:
            arrays[tensor.name] = np.ones(shape, tensor.dtype)
        elif np.dtype(tensor.dtype).kind == "f":
            arrays[tensor.name] = random.standard_normal(shape).astype(tensor.dtype)
        else:
            arrays[tensor.name] = random.integers(0, 2, shape).astype(tensor.dtype)
    return Encoded(length, arrays, {})
