"""How far a variant's answers may be from the reference's, by what was done to the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from gristmill_worker.engines.variant import Variant
    from gristmill_worker.models.manifest import Task

Kind = Literal["fp32", "bf16", "quantized"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one kind of variant; what they are compared with is always the worst case.

    Cosines are for embeddings. A difference is one of probabilities for classifiers; for raw tensors it is
    relative to an output's largest value. Invariance is a text's answer against its own with other
    batch-mates, in another place of the batch, in another batch size and with more padding.
    """

    min_cosine: float
    max_difference: float
    min_invariance_cosine: float
    max_invariance_difference: float
    min_label_agreement: float  # share of texts whose best label is the reference's
    max_drop: float = 0.5  # percentage points of the task's metric: about the noise of a thousand rows

    def changed(self, flags: Mapping[str, float | None]) -> Limits:
        """Return these limits with those of ``flags`` that are not None; unknown names do not count."""
        known = asdict(self)
        return replace(
            self, **{name: value for name, value in flags.items() if value is not None and name in known}
        )

    def agreement(self, task: Task) -> float:
        """Return how far an answer may be from the reference's; 1 - cosine for embeddings."""
        return 1.0 - self.min_cosine if by_cosine(task) else self.max_difference

    def invariance(self, task: Task) -> float:
        """Return how far an answer may be from that to the same text in another batch."""
        return 1.0 - self.min_invariance_cosine if by_cosine(task) else self.max_invariance_difference

    def describe(self, task: Task, difference: float, limit: float) -> str:
        """Return both numbers in words."""
        if difference == float("inf"):
            return "it fails, or answers NaN or infinity"
        if by_cosine(task):
            return f"cosine {1.0 - difference:.7g}, the least allowed is {1.0 - limit:g}"
        return f"difference {difference:.3g}, the most allowed is {limit:g}"

    def figure(self, task: Task, name: str, difference: float) -> dict[str, float]:
        """Return ``difference`` as a cosine or difference, by a name that says which."""
        return {f"{name}_{'cosine' if by_cosine(task) else 'difference'}": as_figure(task, difference)}

    def to_dict(self) -> dict[str, float]:
        """Return the limits by name."""
        return asdict(self)


LIMITS: Final[Mapping[Kind, Limits]] = {
    # Engines differ in the order of their sums alone: MiniLM measured 1 - 4e-13, probabilities 1e-6.
    "fp32": Limits(0.999_999, 1e-4, 0.999_999, 1e-4, 0.99),
    # 8 bits of mantissa: MiniLM measured .99996 against the reference, .99999 among batch-mates; the
    # probabilities of 150 labels .008 and .001.
    "bf16": Limits(0.999, 0.05, 0.9995, 0.02, 0.98),
    # Static or per-row ranges measured .987 to .994, .9996 among batch-mates. A range over the whole batch
    # measured .98 to .99 among batch-mates, a fault at one sequence length .63: neither may pass.
    "quantized": Limits(0.98, 0.2, 0.999, 0.05, 0.95),
}


def by_cosine(task: Task) -> bool:
    """Say whether the answers of ``task`` are compared by cosine, not by difference."""
    return task == "embeddings"


def as_figure(task: Task, difference: float) -> float:
    """Return what people are told: a cosine for embeddings, else the difference itself."""
    return 1.0 - difference if by_cosine(task) else difference


def kind_of(variant: Variant, reference_form: str) -> Kind:
    """Return what was done to the numbers; a pruned form counts as quantized: its weights are others."""
    if variant.form != reference_form or variant.manifest.precision != "fp32":
        return "quantized"
    return variant.floats


def limits_table() -> str:
    """Return all limits as lines for ``--help``."""
    lines = []
    for name in asdict(LIMITS["fp32"]):
        values = ", ".join(f"{kind} {getattr(limits, name):g}" for kind, limits in LIMITS.items())
        lines.append(f"  {name}: {values}")
    return "\n".join(lines)
