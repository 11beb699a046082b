"""The task's own metric on labelled data: what a loss of agreement costs in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputFileError
from gristmill_worker.models.answers import Answer, Answers
from gristmill_worker.models.labelled import Labelled, ScoredPairs
from gristmill_worker.tasks.base import Encoded

Floats = NDArray[np.float64]


class Metric(Protocol):
    """Labelled items and how well answers to them do; all figures are between -1 and 1."""

    @property
    def items(self) -> Sequence[Encoded]:
        """The texts to be answered."""
        ...

    def figures(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return the figures by name, for one answer per item."""
        ...


@dataclass(frozen=True, slots=True)
class Classification:
    """Accuracy and macro F1."""

    items: Sequence[Encoded]
    labels: tuple[int, ...]  # of the items, as positions in the manifest's labels

    def figures(self, answers: Sequence[Answer]) -> dict[str, float]:
        given = np.array(self.labels)  # (items,)
        found = np.array([scores.argmax() for (scores,) in answers])  # (items,)
        return {"accuracy": float((given == found).mean()), "macro_f1": macro_f1(given, found)}


@dataclass(frozen=True, slots=True)
class Similarity:
    """Spearman's correlation of the pairs' cosines with people's scores."""

    items: Sequence[Encoded]
    pairs: tuple[tuple[int, int], ...]  # positions of two items
    scores: tuple[float, ...]

    def figures(self, answers: Sequence[Answer]) -> dict[str, float]:
        vectors = np.array([vector for (vector,) in answers], dtype=np.float64)  # (items, hidden)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        first, second = np.array(self.pairs).T  # (pairs,) each
        cosines = (vectors[first] * vectors[second]).sum(axis=1)  # (pairs,)
        return {"spearman": spearman(cosines, np.array(self.scores))}


def classification(answers: Answers, rows: Labelled) -> Classification:
    """Return the metric of labelled texts; raise :class:`InputFileError` for labels of another model."""
    labels = answers.manifest.labels
    if labels is None:
        raise InputFileError(f"{rows.source} has labels, which a model of {answers.manifest.task} has not")
    places = {label: place for place, label in enumerate(labels)}
    if unknown := sorted(set(rows.labels) - set(places)):
        known = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
        raise InputFileError(f"{rows.source} has the label {unknown[0]!r}, the model only {known}")
    return Classification(answers.encode(rows.texts), tuple(places[label] for label in rows.labels))


def similarity(answers: Answers, rows: ScoredPairs) -> Similarity:
    """Return the metric of scored pairs; raise :class:`InputFileError` for a model without embeddings."""
    if answers.manifest.task != "embeddings":
        raise InputFileError(f"{rows.source} has pairs: they measure embeddings, not {answers.manifest.task}")
    texts: Mapping[str, int] = {
        text: place for place, text in enumerate(dict.fromkeys([*rows.first, *rows.second]))
    }
    pairs = tuple(
        (texts[first], texts[second]) for first, second in zip(rows.first, rows.second, strict=True)
    )
    return Similarity(answers.encode(list(texts)), pairs, rows.scores)


def macro_f1(given: NDArray[np.int_], found: NDArray[np.int_]) -> float:
    """Return the mean F1 over the labels that were given or found; both (items,)."""
    scores = []
    for label in np.union1d(given, found):
        right = np.count_nonzero((given == label) & (found == label))
        scores.append(2 * right / (np.count_nonzero(given == label) + np.count_nonzero(found == label)))
    return float(np.mean(scores))


def spearman(first: Floats, second: Floats) -> float:
    """Return the rank correlation of two columns; NaN if one of them is constant."""
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Floats) -> Floats:
    """Return the ranks, equal values sharing their mean rank; (items,)."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Floats = ((ends - counts + ends - 1) / 2)[places]
    return ranks
