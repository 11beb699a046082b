"""What a batch of a shape costs: measured on this CPU, fitted between measurements, or by a formula."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Final, Literal

import numpy as np

from gristmill_worker.batching.cost_table import CostKey, CostTable, cost_key, load_costs
from gristmill_worker.batching.window_sample import Numbers
from gristmill_worker.engines.base import Shape
from gristmill_worker.engines.variant import Variant

# Fitted to one-core timings of a 6-layer encoder: a call costs as much as two dozen tokens before the first
# one is computed, and attention adds to each token in proportion to the sequence.
CALL_TOKENS: Final = 24.0
ATTENTION_TOKENS: Final = 2048.0

_USUAL: Final = ((1, 32), (8, 32), (4, 128))

_REACH_OCTAVES: Final = 0.5  # how far a measurement corrects the fitted costs around it
_TRUST: Final = 0.2  # weight of "no correction" beside a measurement's 1 at distance 0


def formula(shapes: Sequence[Shape]) -> dict[Shape, float]:
    """Return relative costs, in tokens' worth of time, for an engine that was not measured."""
    return {
        (batch, sequence): CALL_TOKENS + batch * sequence * (1.0 + sequence / ATTENTION_TOKENS)
        for batch, sequence in shapes
    }


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one batch of each shape; ``fitted`` are the shapes that were not measured."""

    seconds: dict[Shape, float]
    fitted: frozenset[Shape]


def fit(measured: Mapping[Shape, float], shapes: Sequence[Shape]) -> Costs:
    """Return the seconds of ``shapes`` from those of the shapes ``measured`` (at least one).

    They never fall where batch or sequence grow: a difference of the wrong sign between two measurements is
    noise and is split evenly.

    Method: least squares of the relative error with coefficients >= 0 for the call, rows, tokens and tokens
    times sequence (attention); what remains at the measured shapes then corrects the shapes around them.
    """
    known = sorted(measured)
    seconds = np.array([measured[shape] for shape in known])
    every = sorted({*known, *shapes})
    values = dict(zip(every, _predict(known, seconds, every), strict=True)) | dict(measured)
    smooth = dict(zip(every, _monotone(every, np.array([values[s] for s in every])).tolist(), strict=True))
    return Costs({shape: smooth[shape] for shape in shapes}, frozenset(set(shapes) - set(known)))


def fit_error(measured: Mapping[Shape, float]) -> float:
    """Return the median relative error of :func:`fit` at measured shapes, each left out in turn."""
    errors = []
    for shape, seconds in measured.items():
        others = {other: value for other, value in measured.items() if other != shape}
        if others:
            errors.append(abs(fit(others, [shape]).seconds[shape] / seconds - 1.0))
    return float(np.median(errors)) if errors else 0.0


def usual_shapes(max_length: int) -> list[Shape]:
    """Return the few shapes that variants of a model are compared by."""
    return [(batch, min(sequence, max_length)) for batch, sequence in _USUAL]


def measured_speed(variant: Variant, threads: int) -> float | None:
    """Return texts per second over usual shapes by the table measured on this CPU; None without one."""
    table = load_costs(variant.model_dir, cost_key(variant, threads))
    if table is None:
        return None
    if table.speed is not None:
        return table.speed
    shapes = usual_shapes(variant.manifest.max_length)
    seconds = fit(table.measured, shapes).seconds
    return len(shapes) / sum(seconds[shape] / shape[0] for shape in shapes)


def costs_for(
    model_dir: Path, key: CostKey, shapes: Sequence[Shape]
) -> tuple[dict[Shape, float], Literal["measured", "formula"]]:
    """Return costs of ``shapes`` and where they come from: the table for ``key``, else the formula.

    Measured costs are seconds, those of the formula relative.
    """
    return costs_of(load_costs(model_dir, key), shapes)


def costs_of(
    table: CostTable | None, shapes: Sequence[Shape]
) -> tuple[dict[Shape, float], Literal["measured", "formula"]]:
    """Return the same from a table that was read already; None if there is none."""
    if table is None:
        return formula(shapes), "formula"
    return fit(table.measured, shapes).seconds, "measured"


def _predict(known: Sequence[Shape], seconds: Numbers, shapes: Sequence[Shape]) -> Numbers:
    """Return the fitted seconds of ``shapes``, drawn towards the measurements near them."""
    coefficients = _least_squares(_terms(known) / seconds[:, None])
    model = _terms(shapes) @ coefficients  # (shapes,)
    residuals = np.log(seconds / (_terms(known) @ coefficients))  # (known,)
    octaves = np.log2(np.array(shapes, float))[:, None] - np.log2(np.array(known, float))
    nearness = np.exp(-((octaves / _REACH_OCTAVES) ** 2).sum(axis=2) / 2)  # (shapes, known)
    predicted: Numbers = model * np.exp(nearness @ residuals / (nearness.sum(axis=1) + _TRUST))
    return predicted


def _terms(shapes: Sequence[Shape]) -> Numbers:
    """Return what the time of a batch is made of, (shapes, terms); the formula's total goes first."""
    batch, sequence = np.array(shapes, float).T
    total = np.array(list(formula(shapes).values()))
    return np.stack([total, np.ones_like(batch), batch, batch * sequence, batch * sequence**2], axis=1)


def _least_squares(terms: Numbers) -> Numbers:
    """Return coefficients >= 0 for which ``terms`` come closest to 1, (terms,).

    There are few terms, so every subset is solved and the best of those without a negative one kept.
    """
    scale = np.linalg.norm(terms, axis=0)
    best, least = np.zeros(terms.shape[1]), np.inf
    for subset in _subsets(min(terms.shape)):
        columns = list(subset)
        solution = np.linalg.lstsq(terms[:, columns] / scale[columns], np.ones(len(terms)), rcond=None)[0]
        error = float(((terms[:, columns] / scale[columns]) @ solution - 1.0).__pow__(2).sum())
        if (solution >= 0.0).all() and error < least - 1e-12:
            best, least = np.zeros(terms.shape[1]), error
            best[columns] = solution / scale[columns]
    return best


def _subsets(size: int) -> Iterable[tuple[int, ...]]:
    for count in range(1, size + 1):
        yield from combinations(range(size), count)


def _monotone(shapes: Sequence[Shape], values: Numbers) -> Numbers:
    """Return the mean of the least value at or above and the greatest at or below each shape."""
    batch, sequence = np.array(shapes).T
    within = (batch[:, None] <= batch) & (
        sequence[:, None] <= sequence
    )  # (shapes, shapes): row fits in column
    at_most = np.where(within, values, np.inf).min(axis=1)
    at_least = np.where(within, values[:, None], 0.0).max(axis=0)
    mean: Numbers = (at_most + at_least) / 2
    return mean
