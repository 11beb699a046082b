"""What is measured of one variant, in a process of its own: an engine may end it, or leave memory behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from math import log2

from gristmill.errors import GristmillError
from gristmill_worker.batching.costs import usual_shapes
from gristmill_worker.engines.base import Engine, Shape, engine_loader
from gristmill_worker.engines.variant import Variant
from gristmill_worker.memory import resident_mb
from gristmill_worker.models.answers import Answer, Answers
from gristmill_worker.models.batch_run import run_items
from gristmill_worker.models.check.invariance import Invariance, is_deterministic, measure_invariance
from gristmill_worker.models.check.metric import Metric
from gristmill_worker.models.self_test import Probes, own_shapes, shape_differences
from gristmill_worker.models.speed import speedup
from gristmill_worker.tasks.base import Encoded


@dataclass(frozen=True, slots=True)
class Job:
    """One variant to examine, and what the reference answered."""

    variant: Variant
    reference: Variant
    threads: int
    shapes: tuple[Shape, ...]  # that a worker would load
    more_shapes: tuple[Shape, ...]  # to be tried in one compilation for all of them
    probes: Probes  # by sequence length, for the shapes
    items: Sequence[Encoded]
    expected: Sequence[Answer]
    metric: Metric | None


@dataclass(slots=True)
class Findings:
    """What was found; differences are as :meth:`Answers.difference` says."""

    failure: str | None = None  # why there is nothing else
    load_s: float = 0.0
    memory_mb: float = 0.0  # that the process grew by
    agreement: list[float] = field(default_factory=list)  # by item
    label_agreement: float | None = None  # share of the items, for classifiers
    invariance: Invariance = field(default_factory=lambda: Invariance(None, None))
    deterministic: bool = True
    shapes: dict[Shape, float] = field(default_factory=dict)
    shared: dict[Shape, float] = field(default_factory=dict)  # of shapes in one compilation for all of them
    speed: dict[Shape, float] = field(default_factory=dict)  # texts/s, relative to the reference
    metric: dict[str, float] = field(default_factory=dict)

    @property
    def by_shape(self) -> dict[Shape, float]:
        """The worse of both."""
        return self.shapes | {
            shape: max(difference, self.shapes.get(shape, 0.0)) for shape, difference in self.shared.items()
        }


def examine(job: Job) -> Findings:
    """Measure everything about one variant; an error of its engine becomes the ``failure``."""
    findings = Findings()
    try:
        _examine(job, findings)
    except GristmillError as error:
        findings.failure = str(error)
    return findings


def _examine(job: Job, findings: Findings) -> None:
    answers = Answers(job.variant.model_dir, job.reference.manifest)
    engine_loader(job.variant.engine)  # the library is not counted as loading, nor as memory of the model
    before, started = resident_mb(), time.perf_counter()
    with closing(job.variant.load(job.shapes, job.threads)) as engine:
        findings.load_s = time.perf_counter() - started
        findings.memory_mb = resident_mb() - before
        found = run_items(engine, answers.task, job.items, answers.read)
        findings.agreement = answers.differences(found, job.expected)
        findings.label_agreement = answers.same_label(found, job.expected)
        findings.invariance = measure_invariance(engine, answers, job.items)
        usual = _nearest(engine.shapes, usual_shapes(answers.manifest.max_length))
        findings.deterministic = is_deterministic(engine, answers, job.items, usual)
        _try_shapes(engine, answers, job.shapes, job.probes, findings)
        if job.metric is not None:
            values = run_items(engine, answers.task, job.metric.items, answers.read)
            findings.metric = job.metric.figures(values)
        with closing(job.reference.load(usual, job.threads)) as reference:
            inputs = job.reference.manifest.inputs
            findings.speed = {
                shape: speedup(reference, engine, inputs, shape, job.threads) for shape in usual
            }
    if job.more_shapes:
        with closing(job.variant.load(job.more_shapes, job.threads, memory_mb=0)) as engine:
            _try_shapes(engine, answers, job.more_shapes, job.probes, findings)


def _try_shapes(
    engine: Engine, answers: Answers, shapes: Sequence[Shape], probes: Probes, findings: Findings
) -> None:
    own = own_shapes(engine)
    for shape, difference in shape_differences(engine, answers, shapes, probes).items():
        kind = findings.shapes if shape in own else findings.shared
        kind[shape] = max(difference, kind.get(shape, 0.0))


def _nearest(shapes: Sequence[Shape], usual: Sequence[Shape]) -> list[Shape]:
    """Return those of ``shapes`` that are nearest to the ``usual`` ones."""

    def distance(wanted: Shape, shape: Shape) -> float:
        return sum(abs(log2(a / b)) for a, b in zip(wanted, shape, strict=True))

    return list(dict.fromkeys(min(shapes, key=partial(distance, wanted)) for wanted in usual))
