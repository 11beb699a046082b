"""Whether an answer depends on what it must not: batch-mates, batch size, place in the batch, padding."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gristmill_worker.engines.base import Array, Engine, Shape
from gristmill_worker.models.answers import Answer, Answers, cut
from gristmill_worker.tasks.base import Encoded

# Unlike any sentence: a quantization range taken over the batch follows them.
ODD_TEXTS: Final = ("!!!! ???? !!!! ???? !!!! ????", "0 0 0 0 0 0 0 0 0 0 0 0", "a")
_SEQUENCES: Final = 5  # lengths that are tried
_SUBJECTS: Final = 2  # texts of about each
_SEED: Final = 17

Alone = Mapping[tuple[int, int], Answer]  # by subject and sequence


@dataclass(frozen=True, slots=True)
class Invariance:
    """The worst differences between two answers to one text; None where no shape lets it differ."""

    batch: float | None
    padding: float | None


def measure_invariance(engine: Engine, answers: Answers, items: Sequence[Encoded]) -> Invariance:
    """Compare answers to a text alone with those in batches of the same length, and in longer batches.

    Alone is the smallest batch of a length, filled with the text itself.
    """
    batches: dict[int, list[int]] = defaultdict(list)
    for batch, sequence in sorted(engine.shapes):
        batches[sequence].append(batch)
    sequences = _spread(sorted(batches))
    subjects = _subjects(items, sequences)
    alone = {
        (at, sequence): answers.run(engine, [item], (batches[sequence][0], sequence))[0]
        for at, item in enumerate(subjects)
        for sequence in sequences
        if item.length <= sequence
    }
    trial = _Trial(engine, answers, items, subjects, alone)
    mixed = [
        trial.batch_difference((batch, sequence), odd=odd)
        for sequence in sequences
        for batch in _spread([size for size in batches[sequence] if size > 1], 2)
        for odd in (False, True)
    ]
    return Invariance(
        batch=max((difference for difference in mixed if difference is not None), default=None),
        padding=trial.padding_difference(),
    )


def is_deterministic(
    engine: Engine, answers: Answers, items: Sequence[Encoded], shapes: Sequence[Shape]
) -> bool:
    """Say whether the same batch twice, with another one in between, gives the same bits."""
    for batch, sequence in shapes:
        fitting = [item for item in items if item.length <= sequence] or [cut(items[0], sequence)]
        inputs, others = (
            answers.task.assemble(rows[:batch], (batch, sequence)) for rows in (fitting[::-1], fitting)
        )
        first = engine.run(inputs)
        engine.run(others)
        if not _same_bits(first, engine.run(inputs)):
            return False
    return True


def _same_bits(first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
    return all(first[name].tobytes() == second[name].tobytes() for name in first)


def _spread(values: Sequence[int], count: int = _SEQUENCES) -> list[int]:
    """Return up to ``count`` of ``values`` from the first to the last."""
    places = np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(int)
    return [values[place] for place in places]


def _subjects(items: Sequence[Encoded], sequences: Sequence[int]) -> list[Encoded]:
    """Return the longest items that each sequence holds."""
    subjects = []
    shorter = 0
    for sequence in sequences:
        fitting = [item for item in items if shorter < item.length <= sequence]
        subjects += sorted(fitting, key=lambda item: item.length)[-_SUBJECTS:]
        shorter = sequence
    return subjects


@dataclass(frozen=True, slots=True)
class _Trial:
    engine: Engine
    answers: Answers
    items: Sequence[Encoded]
    subjects: Sequence[Encoded]
    alone: Alone

    def batch_difference(self, shape: Shape, *, odd: bool) -> float | None:
        """Return the worst difference of subjects among mates, odd ones or other items, in any place."""
        batch, sequence = shape
        random_ = random.Random(f"{_SEED} {shape} {odd}")  # noqa: S311 - a sample
        fitting = [at for at, _ in enumerate(self.subjects) if (at, sequence) in self.alone]
        mates = self._mates(sequence, odd=odd)
        if not fitting or not mates:
            return None
        places: list[int | None] = [*random_.sample(fitting, min(len(fitting), max(1, batch // 2)))]
        places += [None] * (batch - len(places))
        random_.shuffle(places)
        rows = [self.subjects[at] if at is not None else random_.choice(mates) for at in places]
        found = self.answers.run(self.engine, rows, shape)
        return max(
            self.answers.difference(answer, self.alone[at, sequence])
            for at, answer in zip(places, found, strict=True)
            if at is not None
        )

    def padding_difference(self) -> float | None:
        """Return the worst difference of a subject alone from itself alone with more padding."""
        worst: float | None = None
        shortest: dict[int, Answer] = {}
        for (at, _), answer in sorted(self.alone.items(), key=lambda entry: entry[0]):
            if at in shortest:
                worst = max(worst or 0.0, self.answers.difference(answer, shortest[at]))
            else:
                shortest[at] = answer
        return worst

    def _mates(self, sequence: int, *, odd: bool) -> list[Encoded]:
        if odd and self.answers.manifest.task != "tensors":
            return [cut(item, sequence) for item in self.answers.encode(ODD_TEXTS)]
        return [item for item in self.items if item.length <= sequence]
