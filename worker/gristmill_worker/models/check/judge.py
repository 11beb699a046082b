"""From what was found of a variant to figures, broken limits and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from gristmill_worker.engines.base import Shape
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models.check.examine import Findings
from gristmill_worker.models.limits import Limits
from gristmill_worker.models.manifest import Task
from gristmill_worker.models.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Judged:
    """One variant's row of the report."""

    variant: Variant
    findings: Findings
    verdict: Verdict


def judge(
    variant: Variant,
    findings: Findings,
    limits: Limits,
    task: Task,
    reference_metric: Mapping[str, float],
    threads: int,
) -> Judged:
    """Compare ``findings`` with ``limits``; the verdict is for this CPU."""
    figures = _figures(findings, limits, task, reference_metric)
    problems = [findings.failure] if findings.failure else _problems(findings, limits, task, reference_metric)
    verdict = Verdict(
        key=variant.run_key(),
        passed=not problems,
        problems=tuple(problems),
        shapes=_agreeing(findings.shapes, limits.agreement(task)),
        shared_shapes=_agreeing(findings.shared, limits.agreement(task)),
        threads=threads,
        figures={
            name: value for name, value in figures.items() if math.isfinite(value)
        },  # JSON has no others
        limits=limits.to_dict(),
    )
    return Judged(variant, findings, verdict)


def _agreeing(differences: Mapping[Shape, float], limit: float) -> tuple[Shape, ...]:
    return tuple(sorted(shape for shape, difference in differences.items() if difference <= limit))


def drops(findings: Findings, reference_metric: Mapping[str, float]) -> dict[str, float]:
    """Return what each figure of the task's metric lost, in percentage points."""
    return {name: 100.0 * (reference_metric[name] - value) for name, value in findings.metric.items()}


def _problems(
    findings: Findings, limits: Limits, task: Task, reference_metric: Mapping[str, float]
) -> list[str]:
    problems = []
    for name, worst, limit in (
        ("agreement with the reference", max(findings.agreement), limits.agreement(task)),
        ("batch invariance", findings.invariance.batch, limits.invariance(task)),
        ("padding invariance", findings.invariance.padding, limits.invariance(task)),
    ):
        if worst is not None and worst > limit:
            problems.append(f"{name}: {limits.describe(task, worst, limit)}")
    limit = limits.agreement(task)
    tried = findings.by_shape
    if wrong := {shape: found for shape, found in tried.items() if found > limit}:
        worst_shape = max(wrong, key=lambda shape: wrong[shape])
        problems.append(
            f"{len(wrong)} of {len(tried)} shapes ({_listed(wrong)}): worst "
            f"{_name(worst_shape)}, {limits.describe(task, wrong[worst_shape], limit)}"
        )
    share = findings.label_agreement
    if share is not None and share < limits.min_label_agreement:
        problems.append(
            f"label agreement: {share:.2%}, the least allowed is {limits.min_label_agreement:.2%}"
        )
    if not findings.deterministic:
        problems.append("determinism: the same batch twice gives two answers")
    for name, drop in drops(findings, reference_metric).items():
        if not drop <= limits.max_drop:  # NaN is no good either
            problems.append(
                f"{name}: {findings.metric[name]:.4f}, {drop:.2f} points below the reference, "
                f"the most allowed is {limits.max_drop:g}"
            )
    return problems


def _figures(
    findings: Findings, limits: Limits, task: Task, reference_metric: Mapping[str, float]
) -> dict[str, float]:
    figures: dict[str, float] = {}
    if findings.agreement:
        figures |= limits.figure(task, "agreement_worst", max(findings.agreement))
        figures |= limits.figure(task, "agreement_mean", fmean(findings.agreement))
    if findings.label_agreement is not None:
        figures["label_agreement"] = findings.label_agreement
    if findings.invariance.batch is not None:
        figures |= limits.figure(task, "batch_worst", findings.invariance.batch)
    if findings.invariance.padding is not None:
        figures |= limits.figure(task, "padding_worst", findings.invariance.padding)
    if tried := findings.by_shape:
        figures |= limits.figure(task, "shapes_worst", max(tried.values()))
        figures["deterministic"] = float(findings.deterministic)
    figures |= findings.metric
    figures |= {f"{name}_drop_points": drop for name, drop in drops(findings, reference_metric).items()}
    figures |= {f"speed_{_name(shape)}": ratio for shape, ratio in findings.speed.items()}
    if findings.load_s:
        figures |= {"load_s": findings.load_s, "memory_mb": findings.memory_mb}
    return figures


def _listed(shapes: Mapping[Shape, float], most: int = 6) -> str:
    names = [_name(shape) for shape in sorted(shapes)]
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _name(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}"
