"""The fixed shapes that an engine is prepared for: a grid by default, a chosen set where costs are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gristmill.errors import InputFileError
from gristmill_worker.batching.window_sample import Numbers, WindowSample
from gristmill_worker.engines.base import Shape

BATCHES: Final = (1, 2, 4, 8, 16, 32)
SEQUENCES: Final = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FEW_BATCHES: Final = (1, 8)
FEW_SEQUENCES: Final = (16, 64, 192)
MAX_TOKENS: Final = 2048
CANDIDATE_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
WINDOW: Final = 256  # texts that are planned together, unless told otherwise
BETTER: Final = 0.10  # share of the cost that another set of shapes has to save to be worth a restart
_WORTH: Final = 1e-6  # share of the cost below which another shape is no gain
_SMALLEST_SAMPLE: Final = 1000  # lengths without which nothing is suggested
_SEED: Final = 20_240


def default_shapes(max_length: int, max_tokens: int = MAX_TOKENS, *, few: bool = False) -> list[Shape]:
    """Return a grid of (batch, sequence) up to ``max_length``, each of at most ``max_tokens`` tokens.

    Batches of one are there for every length, also where ``max_length`` alone exceeds ``max_tokens``.
    ``few`` is for engines to which every shape is dear.
    """
    steps, batches = (FEW_SEQUENCES, FEW_BATCHES) if few else (SEQUENCES, BATCHES)
    sequences = [*(s for s in steps if s < max_length), max_length]
    return [(b, s) for s in sequences for b in batches if b == 1 or b * s <= max_tokens]


def candidate_shapes(max_length: int, max_tokens: int = MAX_TOKENS) -> list[Shape]:
    """Return the finer grid that :func:`choose_shapes` chooses from: steps of 8, or four in an octave."""
    steps = [8, 16, 24, 32]
    while steps[-1] < max_length:
        octave = steps[-1]
        steps += [octave + octave * quarter // 4 for quarter in (1, 2, 3, 4)]
    sequences = [*(s for s in steps if s < max_length), max_length]
    return [(b, s) for s in sequences for b in CANDIDATE_BATCHES if b == 1 or b * s <= max_tokens]


def check_shapes(shapes: Sequence[Shape], max_length: int) -> list[Shape]:
    """Return ``shapes`` if one holds the longest text, else raise :class:`InputFileError`."""
    longest = max(sequence for _, sequence in shapes)
    if longest != max_length:
        raise InputFileError(
            f"the longest configured shape has {longest} tokens, the model takes {max_length}: "
            f"let the longest entry of batch.shapes be [1, {max_length}]"
        )
    return sorted(set(shapes))


def choose_shapes(
    lengths: Sequence[int],
    candidates: Sequence[Shape],
    cost: Mapping[Shape, float],
    *,
    max_length: int,
    max_count: int | None = None,
    memory_bytes: int | None = None,
    bytes_per_shape: int = 1,
    window: int = WINDOW,
    idle: float = 0.0,
) -> list[Shape]:
    """Return the set of shapes that runs ``lengths`` at the least planned cost; one holds ``max_length``.

    At most ``max_count`` of them, and as many as ``memory_bytes`` hold at ``bytes_per_shape`` each. Costs are
    those of plans of ``window`` texts; ``idle`` is the share of texts that find the worker idle and run
    alone.

    Method: greedy forward selection; then any member is exchanged for the best candidate as long as that
    saves anything. Each step plans the whole sample once for all candidates together. Deterministic. Raises
    ValueError if no candidate holds ``max_length``, or the longest text.
    """
    limit = len(candidates) if max_count is None else max_count
    if memory_bytes is not None:
        limit = min(limit, memory_bytes // bytes_per_shape)
    search = _Search(WindowSample(lengths, window, idle), candidates, cost, max_length)
    chosen = search.grow([], max(1, limit))
    return sorted(search.swap(chosen))


def expected_cost(
    lengths: Sequence[int],
    shapes: Sequence[Shape],
    cost: Mapping[Shape, float],
    window: int = WINDOW,
    idle: float = 0.0,
) -> float:
    """Return the mean cost of one text, in the unit of ``cost``, where ``window`` texts are planned together.

    ``idle`` is the share of texts that run alone.
    """
    return float(WindowSample(lengths, window, idle).costs(shapes, [shapes[0]], cost)[0])


def window_costs(
    lengths: Sequence[int], shapes: Sequence[Shape], cost: Mapping[Shape, float], window: int
) -> Numbers:
    """Return the planned cost of each window of ``lengths``, taken in their order; the last may be short."""
    planned: Numbers = WindowSample(lengths, window).planned(shapes, [shapes[0]], cost)[:, 0]  # (windows,)
    return planned


def ideal_cost(lengths: Sequence[int], cost: Mapping[Shape, float]) -> float:
    """Return what a text would cost on average without padding: a bound that no set of shapes beats.

    Every text has its exact length and runs in full batches of whichever size is cheapest for it. Costs
    between the sequence lengths in ``cost`` are interpolated.
    """
    curves: dict[int, list[Shape]] = {}
    for shape in sorted(cost):
        curves.setdefault(shape[0], []).append(shape)
    asked = np.asarray(lengths)  # (texts,)
    per_text = [
        np.where(
            asked <= shapes[-1][1],
            np.interp(asked, [sequence for _, sequence in shapes], [cost[shape] for shape in shapes]),
            np.inf,
        )
        / batch
        for batch, shapes in curves.items()
    ]
    return float(np.min(per_text, axis=0).mean())


class LengthCounter:
    """Counts texts by length in bounded memory; what came long ago counts less. For one thread."""

    def __init__(self, max_length: int, half_life: int = 100_000) -> None:
        """``half_life``: after so many texts all counts are halved."""
        self._counts = np.zeros(max_length + 1, dtype=np.int64)  # (max_length + 1,), by length
        self._half_life = half_life
        self._since = 0

    def add(self, lengths: Sequence[int]) -> None:
        """Count ``lengths``, of which none may exceed ``max_length``."""
        self._counts += np.bincount(np.asarray(lengths, dtype=np.int64), minlength=len(self._counts))
        self._since += len(lengths)
        if self._since >= self._half_life:
            self._counts //= 2
            self._since = 0

    @property
    def total(self) -> int:
        """The texts that still count."""
        return int(self._counts.sum())

    def sample(self, size: int = 4096) -> list[int]:
        """Return ``size`` lengths (fewer if fewer were seen) that are spread like those seen, shuffled."""
        total = self.total
        size = min(size, total)
        ranks = (np.arange(size) * 2 + 1) * total // (2 * max(1, size))  # evenly among the sorted lengths
        found = np.searchsorted(np.cumsum(self._counts), ranks, side="right")
        shuffled: list[int] = np.random.default_rng(_SEED).permutation(found).tolist()
        return shuffled


@dataclass(frozen=True, slots=True)
class Suggestion:
    """``shapes`` would run the texts seen at ``saving`` (0 to 1) less than the present cost."""

    shapes: tuple[Shape, ...]
    saving: float


def better_shapes(
    counter: LengthCounter,
    shapes: Sequence[Shape],
    candidates: Sequence[Shape],
    cost: Mapping[Shape, float],
    *,
    max_length: int,
    max_count: int | None = None,
    window: int = WINDOW,
    least_saving: float = BETTER,
) -> Suggestion | None:
    """Return a set of at most ``max_count`` (default: as many as now) shapes that saves ``least_saving``.

    ``cost`` holds ``shapes`` and ``candidates``. The set is chosen on one half of the texts and compared on
    the other, so that it does not win by chance. Takes about a second of one core: not for the serving loop.
    """
    sample = counter.sample()
    if len(sample) < _SMALLEST_SAMPLE:
        return None
    half = len(sample) // 2
    limit = max_count or len(set(shapes))
    chosen = choose_shapes(
        sample[:half], candidates, cost, max_length=max_length, max_count=limit, window=window
    )
    now = expected_cost(sample[half:], shapes, cost, window)
    saving = 1.0 - expected_cost(sample[half:], chosen, cost, window) / now
    return Suggestion(tuple(chosen), saving) if saving >= least_saving else None


class _Search:
    """The steps of :func:`choose_shapes`."""

    def __init__(
        self, sample: WindowSample, candidates: Sequence[Shape], cost: Mapping[Shape, float], max_length: int
    ) -> None:
        self._sample = sample
        self._cost = cost
        self._max_length = max_length
        self._candidates = sorted(set(candidates))
        self._holding = [shape for shape in self._candidates if shape[1] >= max_length]
        if not self._holding:
            raise ValueError(f"no candidate holds a text of length {max_length}")

    def grow(self, chosen: list[Shape], count: int) -> list[Shape]:
        """Add the best candidate until there are ``count`` or none saves anything."""
        least = np.inf
        while len(chosen) < count:
            shape, total = self._best_addition(chosen)
            if np.isinf(total):
                raise ValueError("the sample has a text that no candidate holds")
            if total >= least * (1.0 - _WORTH):
                break
            chosen, least = [*chosen, shape], total
        return chosen

    def swap(self, chosen: list[Shape]) -> list[Shape]:
        """Exchange members one at a time until no exchange saves anything."""
        least = float(self._sample.costs(chosen, chosen[:1], self._cost)[0])
        unchanged, at = 0, 0
        while unchanged < len(chosen):
            others = chosen[:at] + chosen[at + 1 :]
            shape, total = self._best_addition(others)
            if total < least * (1.0 - _WORTH):
                chosen, least, unchanged = [*others[:at], shape, *others[at:]], total, 0
            unchanged += 1
            at = (at + 1) % len(chosen)
        return chosen

    def _best_addition(self, chosen: Sequence[Shape]) -> tuple[Shape, float]:
        """Return the candidate that makes ``chosen`` cheapest, and the cost; the result holds every text."""
        holds = any(sequence >= self._max_length for _, sequence in chosen)
        candidates = self._candidates if holds else self._holding
        totals = self._sample.costs(chosen, candidates, self._cost)
        at = int(np.argmin(totals))
        return candidates[at], float(totals[at])
