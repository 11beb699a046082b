"""The items that a check compares answers to: real text of all lengths, or random tensors."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from gristmill.errors import InputFileError
from gristmill_worker.batching.shapes import SEQUENCES
from gristmill_worker.models.answers import Answers, random_item
from gristmill_worker.models.documentation import documentation
from gristmill_worker.models.labelled import column_texts
from gristmill_worker.tasks.base import Encoded, ItemError

TEXTS: Final = 256
_TENSORS: Final = 48  # random ones tell less, and raw models may be of any size
_MAX_ROWS: Final = 4000  # of a file
_PARAGRAPHS: Final = 1200
_JOINED: Final = (2, 4, 8, 16)  # paragraphs: few are as long as what models take
_JOINS: Final = 80
_SEED: Final = 13


def check_items(answers: Answers, path: Path | None, column: str) -> list[Encoded]:
    """Return items of many lengths: texts of ``path``, else of Python's documentation; or random tensors.

    Raises :class:`InputFileError` for a file without texts.
    """
    if answers.manifest.task == "tensors":
        generator = np.random.default_rng(_SEED)
        lengths = np.geomspace(1, answers.manifest.max_length, _TENSORS).round().astype(int).tolist()
        return [random_item(answers.manifest, length, generator) for length in lengths]
    texts: Iterable[str | None] = _documentation() if path is None else column_texts(path, column, _MAX_ROWS)
    encoded = answers.task.encode([{"text": text} for text in texts if text is not None])
    items = [item for item in encoded if not isinstance(item, ItemError)]
    if not items:
        raise InputFileError(f"{path} has no text in the column {column!r}")
    return _spread(items, answers.manifest.max_length)


def _documentation() -> list[str]:
    shuffle = random.Random(_SEED)  # noqa: S311 - a sample
    paragraphs = list(documentation())
    joined = [
        " ".join(paragraphs[start : start + count])
        for count in _JOINED
        for start in shuffle.sample(range(len(paragraphs) - count), min(_JOINS, len(paragraphs) - count))
    ]
    return [*shuffle.sample(paragraphs, min(_PARAGRAPHS, len(paragraphs))), *joined]


def _spread(items: Sequence[Encoded], max_length: int) -> list[Encoded]:
    """Return up to TEXTS of ``items``, as many of each range of lengths as there are, the shortest first."""
    bounds = [*(size for size in SEQUENCES if size < max_length), max_length]
    ranges: list[list[Encoded]] = [[] for _ in bounds]
    for item in items:
        ranges[int(np.searchsorted(bounds, item.length))].append(item)
    chosen: list[Encoded] = []
    filled = sorted((group for group in ranges if group), key=len)
    for left, group in zip(range(len(filled), 0, -1), filled, strict=True):
        chosen += group[: (TEXTS - len(chosen)) // left]
    return sorted(chosen, key=lambda item: item.length)
