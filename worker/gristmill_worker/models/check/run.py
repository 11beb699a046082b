"""``model check``: all variants of a model against its reference, on this CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gristmill.errors import InputFileError
from gristmill_worker.batching.shapes import candidate_shapes, default_shapes
from gristmill_worker.batching.sizing import Sizing
from gristmill_worker.cpus import cpu_features
from gristmill_worker.engines import deepsparse
from gristmill_worker.engines.base import Shape
from gristmill_worker.engines.choice import ANY, NULL, Wanted, obstacle_to, variants
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.answers import Answer, Answers
from gristmill_worker.models.batch_run import plan_items, run_items, shapes_for
from gristmill_worker.models.check import metric as metrics
from gristmill_worker.models.check import own_process
from gristmill_worker.models.check.examine import Findings, Job, examine
from gristmill_worker.models.check.judge import Judged, judge
from gristmill_worker.models.check.metric import Metric
from gristmill_worker.models.check.texts import check_items
from gristmill_worker.models.labelled import Labelled, ScoredPairs
from gristmill_worker.models.limits import LIMITS, kind_of
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.models.self_test import answer_probes, is_reference, probe_items, reference_of
from gristmill_worker.models.verdict import save_verdict
from gristmill_worker.settings import Settings
from gristmill_worker.tasks.base import Encoded
from gristmill_worker.tune.measure import Say, bound

_SWEPT_BATCH: Final = 2  # of every candidate length: faults go by the length, whatever the batch


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What ``model check`` is asked to do. ``cores`` None: all that this process may use."""

    model: Path
    wanted: Wanted = ANY
    texts: Path | None = None  # None: paragraphs of Python's documentation
    text_column: str = "text"
    data: Labelled | ScoredPairs | None = None
    limits: dict[str, float | None] = field(default_factory=dict)  # of Limits, instead of the defaults
    cores: tuple[int, ...] | None = None
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """What was found of every variant."""

    manifest: Manifest
    judged: tuple[Judged, ...]
    killed: dict[str, str]  # variant -> how its process was ended from outside: this says nothing of it
    obstacles: dict[str, str]  # variant -> why it cannot run here
    texts: int
    longest: int  # tokens
    reference_metric: dict[str, float]
    seconds: float
    not_stored: str | None  # why the verdicts could not be stored

    @property
    def passed(self) -> bool:
        """Every variant was judged, and none broke a limit."""
        return not self.killed and all(entry.verdict.passed for entry in self.judged)


def check(options: CheckOptions, say: Say = lambda _: None) -> Report:
    """Check the variants that can run here, and store each one's verdict beside the model when it is found.

    Raises :class:`InputFileError` for a model, texts, data or cores that cannot be used, and if no variant
    that was asked for can run.
    """
    with ExitStack() as stack:
        if options.cores is not None:
            stack.enter_context(bound(options.cores))
        return _check(options, say)


def _check(options: CheckOptions, say: Say) -> Report:
    started = time.monotonic()
    manifest = manifests.load(options.model)
    reference = reference_of(options.model, manifest)
    runnable, obstacles = _variants(options, manifest)
    answers = Answers(options.model, reference.manifest)
    items = check_items(answers, options.texts, options.text_column)
    metric = _metric(answers, options.data)
    say("asking the reference")
    expected = _alone(answers, reference, items, options.threads)
    metric_values = _planned(answers, reference, metric, options.threads)
    sizes = [_shapes(options, variant, reference) for variant in runnable]
    lengths = {sequence for pair in sizes for part in pair for _, sequence in part}
    probes = answer_probes(answers, reference, probe_items(answers, lengths), options.threads)
    judged: list[Judged] = []
    killed: dict[str, str] = {}
    not_stored: str | None = None
    for variant, (usual, more) in zip(runnable, sizes, strict=True):
        say(f"checking {variant}")
        job = Job(variant, reference, options.threads, usual, more, probes, items, expected, metric)
        limits = LIMITS[kind_of(variant, reference.form)].changed(options.limits)
        try:
            findings = _examine(job)
        except own_process.ProcessDiedError as error:
            killed[str(variant)] = str(error)
            continue
        judged.append(judge(variant, findings, limits, manifest.task, metric_values, options.threads))
        not_stored = _store(options.model, judged[-1]) or not_stored
    return Report(
        manifest=manifest,
        judged=tuple(judged),
        killed=killed,
        obstacles=obstacles,
        texts=len(items),
        longest=max(item.length for item in items),
        reference_metric=metric_values,
        seconds=time.monotonic() - started,
        not_stored=not_stored,
    )


def _variants(options: CheckOptions, manifest: Manifest) -> tuple[list[Variant], dict[str, str]]:
    """Return the variants that can run, and why others cannot."""
    if options.wanted.engine == NULL:
        raise InputFileError("the engine 'null' computes nothing that could be checked")
    features = cpu_features()
    runnable, obstacles = [], {}
    for variant in variants(options.model, manifest, options.wanted):
        if (obstacle := obstacle_to(variant, features)) is None:
            runnable.append(variant)
        else:
            obstacles[str(variant)] = obstacle
    if not runnable:
        reasons = "; ".join(f"{variant}: {obstacle}" for variant, obstacle in obstacles.items())
        raise InputFileError(
            f"nothing of {manifest.name} can be checked here: {reasons or 'no such variant'}"
        )
    return runnable, obstacles


def _metric(answers: Answers, data: Labelled | ScoredPairs | None) -> Metric | None:
    if data is None:
        return None
    if isinstance(data, Labelled):
        return metrics.classification(answers, data)
    return metrics.similarity(answers, data)


def _shapes(
    options: CheckOptions, variant: Variant, reference: Variant
) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """Return what a worker would load, and what else it might after tuning: every length in a small batch.

    Nothing else where each shape is a compilation of its own (seconds, and a copy of the weights).
    """
    settings = Settings(queue="check", model=options.model, threads=options.threads)
    shapes = tuple(Sizing.of(settings, variant).shapes)
    if is_reference(variant, reference) or variant.engine == deepsparse.NAME:
        return shapes, ()
    candidates = candidate_shapes(variant.manifest.max_length, settings.batch.max_tokens)
    return shapes, tuple(shape for shape in candidates if shape[0] == _SWEPT_BATCH)


def _alone(answers: Answers, reference: Variant, items: Sequence[Encoded], threads: int) -> list[Answer]:
    """Return the reference's answers in batches of one."""
    with closing(reference.load(shapes_for(items, 1), threads)) as engine:
        values: list[Answer] = run_items(engine, answers.task, items, answers.read)
    return values


def _planned(answers: Answers, reference: Variant, metric: Metric | None, threads: int) -> dict[str, float]:
    """Return the reference's figures on labelled data."""
    if metric is None:
        return {}
    shapes = default_shapes(reference.manifest.max_length)
    used = sorted({batch.shape for batch in plan_items(metric.items, shapes)})
    with closing(reference.load(used, threads)) as engine:
        return metric.figures(run_items(engine, answers.task, metric.items, answers.read))


def _examine(job: Job) -> Findings:
    """Examine in another process; what that dies of is found, unless it was killed (ProcessDiedError)."""
    try:
        return own_process.call(examine, job)
    except own_process.ProcessDiedError as error:
        if error.killed:
            raise
        return Findings(failure=str(error))


def _store(model_dir: Path, judged: Judged) -> str | None:
    """Return why the verdict cannot be stored; None if it is."""
    try:
        save_verdict(model_dir, judged.verdict)
    except InputFileError as error:
        return str(error)
    return None
