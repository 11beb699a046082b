"""``gristmill-worker tune``: measures a model on this CPU and recommends how to run it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from gristmill.errors import InputFileError
from gristmill_worker.batching.cost_table import (
    CostKey,
    CostTable,
    Measurement,
    cost_key,
    load_costs,
    save_costs,
)
from gristmill_worker.batching.costs import Costs, fit, fit_error, usual_shapes
from gristmill_worker.batching.shapes import candidate_shapes, default_shapes
from gristmill_worker.engines.base import Engine, Shape
from gristmill_worker.engines.choice import ANY, Wanted, choose
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.documentation import documentation
from gristmill_worker.models.labelled import column_texts
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.models.records import check_writable
from gristmill_worker.tasks.base import Encoded, make_task
from gristmill_worker.tune.advice import WINDOWS, Advisor, Recommendation
from gristmill_worker.tune.compare import (
    Comparison,
    Compilations,
    VariantRow,
    compare_compilations,
    compare_variants,
)
from gristmill_worker.tune.measure import (
    CHEAP_SWITCHING,
    COMPARED_CORES,
    OpenEngine,
    Say,
    ThreadRow,
    Timings,
    bound,
    compare_threads,
    measure,
)

_MEMORY_MB: Final = 4096  # for compilations of single shapes
SAMPLE: Final = 4096  # lengths that sets of shapes are judged by
_FEW: Final = 16  # shapes at most where a change of shape is dear
_MANY: Final = 32
_MAX_ROWS: Final = 20_000  # of a file of texts
_COMPARING: Final = 0.2  # share of the time for threads against engines
_COMPARING_VARIANTS: Final = 0.1
_COMPARING_COMPILATIONS: Final = 0.05
_SEED: Final = 11


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What ``tune`` is asked to do. ``cores`` None: all that this process may use."""

    model: Path
    wanted: Wanted = ANY
    cores: tuple[int, ...] | None = None
    threads: int = 1
    texts: Path | None = None  # None: paragraphs of Python's documentation
    text_column: str = "text"
    seconds: float = 150.0  # for measuring
    max_shapes: int | None = None
    latency_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured and what follows."""

    key: CostKey
    variant: Variant
    cores: tuple[int, ...]
    lengths: tuple[int, ...]  # of the texts, in tokens
    texts: str  # where they come from
    skipped: int  # rows of the file without a text
    costs: Costs  # of all candidates
    fit_error: float  # median relative error of fitted costs
    passes: int
    measuring_s: float
    switching_alone: float | None  # share that a change of shape adds to batches of one
    switching: float | None  # and to larger batches
    default_shapes: int  # that a worker uses without any configuration
    default_efficiency: float  # cost without any padding / planned cost, in windows of 256
    by_count: Mapping[int, float]  # efficiency of the best set of so many shapes
    by_window: Mapping[int, float]  # texts/s of one worker by texts in a window, with the chosen shapes
    compared: tuple[VariantRow, ...]  # the fastest goes first; () for a single variant
    refused: Mapping[str, str]  # variants that did not load, and why
    compilations: Compilations | None  # None: the engine has one kind
    threads: tuple[ThreadRow, ...]
    recommendations: tuple[Recommendation, ...]
    table: Path


def tune(options: TuneOptions, say: Say = lambda _: None) -> Report:
    """Measure, store the table of costs beside the model, and recommend.

    Raises InputFileError for a model, texts or cores that cannot be used, and before measuring where the
    table could not be stored.
    """
    whole = manifests.load(options.model)
    check_writable(options.model)
    cores = options.cores or tuple(sorted(os.sched_getaffinity(0)))
    if options.threads > len(cores):
        raise InputFileError(f"{options.threads} threads need as many cores, there are {len(cores)}")
    lengths, skipped = text_lengths(options, whole)

    measured = _measure(options, whole, cores, lengths, say)
    variant, manifest, timings = measured.variant, measured.variant.manifest, measured.timings
    rows, compared = measured.threads, measured.compared
    candidates = candidate_shapes(manifest.max_length)
    key = cost_key(variant, options.threads)
    seconds = timings.seconds()
    table = CostTable(
        key=key, measurements=_measurements(seconds, {shape: timings.runs(shape) for shape in seconds})
    )
    say("choosing shapes")
    costs = fit(table.measured, candidates)
    advisor = Advisor(lengths, costs.seconds, manifest.max_length, options.max_shapes or _limit(timings))
    sets = advisor.by_count()
    shapes = advisor.fewest(sets)
    _store_others(options, variant, compared)
    chosen = {"shapes": tuple(shapes), "speed": compared.speed(variant)}
    path = save_costs(options.model, table.model_copy(update=chosen))
    advice = [advisor.for_throughput(shapes, options.threads, len(cores), rows)]
    if options.latency_ms is not None:
        advice.append(advisor.for_latency(options.latency_ms, options.threads, len(cores), rows))
    return Report(
        key=key,
        variant=variant,
        cores=cores,
        lengths=tuple(lengths),
        texts=str(options.texts or "paragraphs of Python's documentation"),
        skipped=skipped,
        costs=costs,
        fit_error=fit_error(table.measured),
        passes=timings.passes,
        measuring_s=measured.seconds,
        switching_alone=timings.switching(alone=True),
        switching=timings.switching(alone=False),
        default_shapes=len(default_shapes(manifest.max_length)),
        default_efficiency=advisor.efficiency(default_shapes(manifest.max_length)),
        by_count={count: advisor.efficiency(chosen) for count, chosen in sets.items()},
        by_window={window: advisor.texts_per_s(shapes, window) for window in WINDOWS},
        compared=compared.rows,
        refused=compared.refused,
        compilations=measured.compilations,
        threads=tuple(rows),
        recommendations=tuple(advice),
        table=path,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """Everything that was timed."""

    compared: Comparison
    variant: Variant  # the one that was measured further
    compilations: Compilations | None
    timings: Timings
    threads: list[ThreadRow]
    seconds: float  # that it took


def _measure(
    options: TuneOptions, whole: Manifest, cores: Sequence[int], lengths: Sequence[int], say: Say
) -> _Measured:
    """Compare the variants, and time the best one: its compilations, its shapes, its threads."""
    started = time.monotonic()
    own_cores = cores[: options.threads]
    with bound(own_cores):
        compared = compare_variants(
            options.model,
            whole,
            options.wanted,
            threads=options.threads,
            seconds=options.seconds * _COMPARING_VARIANTS,
            say=say,
        )
    choice = choose(options.model, whole, options.wanted, measured=compared.speed, refused=compared.refused)
    variant, manifest = choice.variant, choice.variant.manifest

    def open_engine(threads: int, shapes: Sequence[Shape]) -> Engine:
        return variant.load(shapes, threads, memory_mb=_MEMORY_MB)

    several = len(cores) > 1
    with bound(own_cores):
        compilations = compare_compilations(
            variant,
            usual_shapes(manifest.max_length),
            threads=options.threads,
            seconds=options.seconds * _COMPARING_COMPILATIONS,
            say=say,
        )
        spent = _COMPARING * several
        spent += _COMPARING_VARIANTS * bool(compared.rows) + _COMPARING_COMPILATIONS * bool(compilations)
        timings = measure(
            open_engine,
            manifest.inputs,
            candidate_shapes(manifest.max_length),
            threads=options.threads,
            seconds=options.seconds * (1 - spent),
            say=say,
        )
    rows = (
        _compare(open_engine, manifest, lengths, cores, options.seconds * _COMPARING, say) if several else []
    )
    return _Measured(compared, variant, compilations, timings, rows, time.monotonic() - started)


def _store_others(options: TuneOptions, variant: Variant, compared: Comparison) -> None:
    """Store the speeds of all variants but the one that is measured further, so that auto knows them."""
    for row in compared.rows:
        if str(row.variant) != str(variant):
            key = cost_key(row.variant, options.threads)
            before = load_costs(options.model, key)
            runs = dict.fromkeys(row.seconds, row.runs)
            table = before or CostTable(key=key, measurements=_measurements(row.seconds, runs))
            save_costs(options.model, table.model_copy(update={"speed": row.speed}))


def _limit(timings: Timings) -> int:
    """Return how many shapes to use at most: few where going from one to another takes time."""
    changes = (timings.switching(alone=True), timings.switching(alone=False))
    return _MANY if all(change is None or change < CHEAP_SWITCHING for change in changes) else _FEW


def text_lengths(options: TuneOptions, manifest: Manifest) -> tuple[list[int], int]:
    """Return the lengths in tokens of the texts, repeated or thinned out to SAMPLE and shuffled.

    The number says how many rows of the file have no text and were left out.
    """
    if manifest.task == "tensors":
        raise InputFileError(f"{manifest.name} takes tensors: only models that take text can be tuned")
    if options.texts is None:
        rows: list[str | None] = list(documentation())
    else:
        rows = list(column_texts(options.texts, options.text_column, _MAX_ROWS))
    task = make_task(options.model, manifest, truncate=True)
    items = task.encode([{"text": row} for row in rows])
    found = [item.length for item in items if isinstance(item, Encoded)]
    if not found:
        raise InputFileError(f"{options.texts} has no text in the column {options.text_column!r}")
    rng = random.Random(_SEED)  # noqa: S311 - a sample
    rng.shuffle(found)
    lengths = [found[at % len(found)] for at in range(SAMPLE)]
    rng.shuffle(lengths)
    return lengths, len(rows) - len(found)


def _measurements(seconds: Mapping[Shape, float], runs: Mapping[Shape, int]) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(shape=shape, seconds=median, runs=runs[shape])
        for shape, median in sorted(seconds.items())
    )


def _compare(
    open_engine: OpenEngine,
    manifest: Manifest,
    lengths: Sequence[int],
    cores: Sequence[int],
    seconds: float,
    say: Say,
) -> list[ThreadRow]:
    """Compare threads with engines at a usual and a long text, alone and in a batch."""
    usual, long = (int(np.ceil(np.percentile(lengths, percent) / 8)) * 8 for percent in (50, 95))
    usual, long = min(usual, manifest.max_length), min(long, manifest.max_length)
    shapes = sorted({(1, usual), (8, usual), (1, long)})
    return compare_threads(
        open_engine, manifest.inputs, shapes, cores[:COMPARED_CORES], seconds=seconds, say=say
    )
