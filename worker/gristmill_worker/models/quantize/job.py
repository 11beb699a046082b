"""What a kind of quantized form is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from gristmill_worker.cpus import cpu_features
from gristmill_worker.models.answers import Answers
from gristmill_worker.models.calibration import Batch
from gristmill_worker.models.limits import by_cosine
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.tasks.base import Encoded

Calibration = Literal["min-max", "percentile", "entropy"]
Say = Callable[[str], None]

MIN_COSINE: Final = 0.99
MAX_DIFFERENCE: Final = 0.1
MAX_FLOAT_SHARE: Final = 0.25
_WIDE_SUMS: Final = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimd"})


def default_reduce_range() -> bool:
    """Say whether this CPU adds products of bytes in 16 bits, where sums of full-range products saturate."""
    return not cpu_features() & _WIDE_SUMS


@dataclass(frozen=True, slots=True)
class Options:
    """How to quantize; each kind uses what it understands."""

    calibration: Calibration = "min-max"
    min_cosine: float = MIN_COSINE  # of embeddings to the reference's; layers are kept in float for it
    max_difference: float = MAX_DIFFERENCE  # the same for probabilities
    max_float_share: float = MAX_FLOAT_SHARE  # of the layers, to keep in float at most
    reduce_range: bool = field(default_factory=default_reduce_range)  # weights of 7 bits
    attention: bool = False  # the multiplications inside the attention too
    sparsity: float = 0.0  # share of weights to make zero

    def goal(self, manifest: Manifest) -> float:
        """Return how far the worst answer should be from the reference's; see :meth:`Answers.difference`."""
        return 1.0 - self.min_cosine if by_cosine(manifest.task) else self.max_difference


@dataclass(frozen=True, slots=True)
class Job:
    """A form to make. The three samples of texts have none in common."""

    model_dir: Path
    answers: Answers  # of the reference
    calibration: Sequence[Encoded]  # to take ranges of values from
    trial: Sequence[Encoded]  # to choose by
    options: Options
    threads: int
    folder: Path  # empty, to write into
    say: Say

    @property
    def manifest(self) -> Manifest:
        """Of the reference alone."""
        return self.answers.manifest

    def batches(self) -> list[Batch]:
        """Return each text to calibrate with as a batch of its own, without padding."""
        return [self.answers.task.assemble([item], (1, item.length)) for item in self.calibration]


@dataclass(frozen=True, slots=True)
class Made:
    """What was written into the job's folder: ``files``, of one stem, ``file`` among them."""

    file: str
    files: tuple[str, ...]
    engines: tuple[str, ...]
    method: str  # for people, in one line
    sparsity: float
    notes: tuple[str, ...] = ()  # what was found on the way, a sentence each


class Make(Protocol):
    """``make`` of a kind's module. Raises ModelRefusedError for a model that it cannot quantize."""

    def __call__(self, job: Job) -> Made: ...
