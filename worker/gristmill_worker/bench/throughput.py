"""Throughput of one worker core: the engine's own ceiling, the same work through Redis, and FIFO batches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, Final

from gristmill.bulk.source import open_rows
from gristmill.errors import InputFileError, InvalidRequestError
from gristmill_worker.batching.cost_table import cost_key
from gristmill_worker.batching.costs import costs_for, measured_speed
from gristmill_worker.batching.planner import Batch, Planner
from gristmill_worker.batching.shapes import candidate_shapes, choose_shapes, default_shapes, ideal_cost
from gristmill_worker.bench.rig import Flow, Rig, score_all
from gristmill_worker.engines.base import Array, Engine, Shape
from gristmill_worker.engines.choice import Wanted, choose
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.documentation import documentation
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.settings import BatchSettings
from gristmill_worker.tasks.base import Encoded, ItemError, Task, make_task
from gristmill_worker.tune.advice import IDLE
from gristmill_worker.tune.measure import bound

Say = Callable[[str], None]

MAX_SHAPES: Final = 16
FIFO_BATCH: Final = 32
FIFO_MULTIPLE: Final = 8  # tokens
SHORT_WORDS: Final = 6
MOST_ROWS: Final = 100_000  # of a file
WINDOW: Final = 1024  # requests in flight: the client's default
NULL_WINDOW: Final = 4096
WARM_UP: Final = 64  # texts through a worker before anything is counted


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much to measure."""

    rounds: int = 3
    seconds_per_load: float = 8.0
    null_requests: int = 12_000  # in each round
    idle_requests: int = 200
    bursts: int = 20  # of each kind


QUICK: Final = Amounts(rounds=1, seconds_per_load=0.5, null_requests=1500, idle_requests=40, bursts=3)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a model on an engine and a CPU, with texts encoded and a set of shapes chosen.

    ``costs`` are of ``shapes``, ``fine`` of many shapes; both in seconds where they were ``measured``, else
    relative. ``core`` is the worker's CPU, ``other_core`` that of Redis and the producer.
    """

    variant: Variant
    task: Task
    threads: int
    core: int
    other_core: int
    texts: Sequence[str]
    items: list[Encoded]
    shapes: list[Shape]
    costs: dict[Shape, float]
    fine: dict[Shape, float]
    measured: bool
    options: dict[str, Any] = field(default_factory=dict)  # of every request

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [item.length for item in self.items]

    @property
    def manifest(self) -> Manifest:
        """Of the form that is measured."""
        return self.variant.manifest

    def load(self, shapes: Sequence[Shape]) -> Engine:
        """Load the engine on the worker's CPU in this process."""
        with bound([self.core]):
            return self.variant.load(shapes, self.threads)

    def settings(self, **batch: Any) -> dict[str, Any]:
        """Return a worker's settings for exactly this; ``batch`` as in its section of that name."""
        return {
            "model": self.variant.model_dir,
            "engine": self.variant.engine,
            "form": self.variant.form,
            "precision": self.variant.floats,
            "threads": self.threads,
            "batch": BatchSettings(shapes=tuple(self.shapes), **batch),
        }


def prepare(
    model: Path,
    wanted: Wanted,
    threads: int,
    cores: tuple[int, int],
    texts: Sequence[str],
    sample: Sequence[str],
) -> Subject:
    """Encode ``texts`` and choose shapes; ``cores`` are the worker's and the other one.

    With a table of costs measured on this CPU: at most MAX_SHAPES shapes, chosen as ``tune`` does for the
    lengths of ``sample``. Without: the worker's default grid, planned by the formula. Raises InputFileError
    for a model or text that cannot be used.
    """
    whole = manifests.load(model)
    variant = choose(model, whole, wanted, measured=lambda each: measured_speed(each, threads)).variant
    manifest = variant.manifest
    if manifest.task == "tensors":
        raise InputFileError(f"{manifest.name} takes tensors: only models that score text are measured")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a worker
    task = make_task(model, manifest, truncate=True)
    items = _encode(task, texts)
    key = cost_key(variant, threads)
    grid = default_shapes(manifest.max_length)
    candidates = candidate_shapes(manifest.max_length)
    fine, origin = costs_for(model, key, sorted({*candidates, *grid}))
    shapes = grid
    if origin == "measured":
        lengths = [item.length for item in _encode(task, sample)]
        longest = manifest.max_length
        shapes = choose_shapes(lengths, candidates, fine, max_length=longest, max_count=MAX_SHAPES, idle=IDLE)
    return Subject(
        variant=variant,
        task=task,
        threads=threads,
        core=cores[0],
        other_core=cores[1],
        texts=texts,
        items=items,
        shapes=shapes,
        costs={shape: fine[shape] for shape in shapes},
        fine=fine,
        measured=origin == "measured",
        options={"encoding": "base64"} if manifest.task == "embeddings" else {},
    )


def _encode(task: Task, texts: Sequence[str]) -> list[Encoded]:
    items: list[Encoded] = []
    for text, item in zip(texts, task.encode([{"text": text} for text in texts]), strict=True):
        if isinstance(item, ItemError):
            raise InputFileError(f"the text {text[:60]!r} cannot be used: {item.message}")
        items.append(item)
    return items


def read_texts(path: Path | None, column: str | None) -> list[str]:
    """Return the texts in ``column`` of a file, without blank ones; with no file Python's documentation.

    None comes twice: of equal ones in a window a worker runs only one. Raises InputFileError for a file, or
    a row, that cannot be read.
    """
    if path is None or column is None:
        return list(documentation())
    try:
        with open_rows(path) as reader:
            texts = [text for row in islice(reader, MOST_ROWS) if (text := row.text(column)).strip()]
    except InvalidRequestError as error:
        raise InputFileError(f"{path}: {error}") from error
    if not texts:
        raise InputFileError(f"{path} has no text in the column {column!r}")
    return list(dict.fromkeys(texts))


def split(texts: Sequence[str], count: int) -> tuple[list[str], list[str]]:
    """Return ``count`` texts to measure and a sample to choose shapes by: every second text is in each.

    Where there are too few texts the measured ones are repeated; a single text is in both.
    """
    return list(islice(cycle(texts[0::2]), count)), list(texts[1::2] or texts)


@dataclass(frozen=True, slots=True)
class Planned:
    """The windows of a stream of texts as a worker under backlog plans them.

    ``batches`` hold indices into all texts. ``efficiency`` is the cost of the no-padding ideal divided by the
    cost of the planned batches, both by the same table: in the ideal every text has its exact length and runs
    in full batches of whichever size is cheapest for that length, in the plan it runs in one of the shapes in
    use, with the texts of its window. ``token_efficiency`` is real tokens divided by tokens with padding.
    """

    batches: list[Batch]
    us_per_item: float  # of the planner, median of all windows
    efficiency: float
    token_efficiency: float


def plan_windows(subject: Subject, window: int) -> Planned:
    """Plan windows of ``window`` texts in the order of arrival."""
    planner = Planner(subject.shapes, subject.costs)
    lengths = subject.lengths
    batches: list[Batch] = []
    us_per_item = []
    for start in range(0, len(lengths), window):
        part = lengths[start : start + window]
        started = time.perf_counter()
        found = planner.plan(part)
        us_per_item.append((time.perf_counter() - started) * 1e6 / len(part))
        batches += [Batch(tuple(start + i for i in batch.items), batch.shape) for batch in found]
    planned_cost = sum(subject.costs[batch.shape] for batch in batches)
    padded = sum(batch.shape[0] * batch.shape[1] for batch in batches)
    return Planned(
        batches=batches,
        us_per_item=median(us_per_item),
        efficiency=len(lengths) * ideal_cost(lengths, subject.fine) / planned_cost,
        token_efficiency=sum(lengths) / padded,
    )


def fifo_batches(lengths: Sequence[int], max_length: int) -> list[Batch]:
    """Cut into batches of FIFO_BATCH in the order of arrival, each padded to its longest text.

    The sequence is rounded up to FIFO_MULTIPLE tokens; the last batch has as many rows as texts.
    """
    batches = []
    for start in range(0, len(lengths), FIFO_BATCH):
        items = tuple(range(start, min(start + FIFO_BATCH, len(lengths))))
        longest = max(lengths[i] for i in items)
        sequence = min(max_length, -(-longest // FIFO_MULTIPLE) * FIFO_MULTIPLE)
        batches.append(Batch(items, (len(items), sequence)))
    return batches


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests per second by round, and what came with them."""

    ceiling: list[float]  # only the engine: windows planned and assembled in advance, in this process
    fifo: list[float]  # only the engine: a part of the FIFO batches in each round, all of them in all rounds
    fifo_s: float  # of all FIFO batches
    flow: Flow  # end to end
    planned: Planned


def measure_throughput(rig: Rig, subject: Subject, amounts: Amounts, say: Say) -> Throughput:
    """Measure engine ceiling, end to end and FIFO in turns, on the same CPU and texts.

    FIFO is slow: each of its batches runs once, every n-th of them in each of n rounds.
    """
    max_items = BatchSettings().max_items
    with bound([subject.core]):
        planned = plan_windows(subject, max_items)
    ceiling, fifo_rates, fifo_s, flow = [], [], 0.0, Flow()
    fifo = fifo_batches(subject.lengths, subject.manifest.max_length)
    say(f"loading the worker and two engines, {len(subject.shapes)} shapes")
    with ExitStack() as stack:
        worker = stack.enter_context(rig.worker("throughput", subject.core, **subject.settings()))
        engine = stack.enter_context(closing(subject.load(subject.shapes)))
        fifo_engine = stack.enter_context(closing(subject.load(sorted({batch.shape for batch in fifo}))))
        inputs, fifo_inputs = (
            [subject.task.assemble([subject.items[i] for i in b.items], b.shape) for b in batches]
            for batches in (planned.batches, fifo)
        )
        score_all(rig, worker, subject.texts[:WARM_UP], Flow(), options=subject.options, window=WINDOW)
        for number in range(amounts.rounds):
            name = f"round {number + 1} of {amounts.rounds}"
            say(f"{name}: engine")
            ceiling.append(len(subject.texts) / _seconds(subject, engine, inputs))
            say(f"{name}: end to end")
            score_all(rig, worker, subject.texts, flow, options=subject.options, window=WINDOW)
            say(f"{name}: FIFO")
            if part := fifo[number :: amounts.rounds]:
                seconds = _seconds(subject, fifo_engine, fifo_inputs[number :: amounts.rounds])
                fifo_s += seconds
                fifo_rates.append(sum(len(batch.items) for batch in part) / seconds)
    return Throughput(ceiling, fifo_rates, fifo_s, flow, planned)


def _seconds(subject: Subject, engine: Engine, inputs: Sequence[dict[str, Array]]) -> float:
    """Return the time that ``engine`` takes for all of ``inputs`` on the worker's CPU."""
    with bound([subject.core]):
        started = time.perf_counter()
        for arrays in inputs:
            engine.run(arrays)
        return time.perf_counter() - started


def measure_null(rig: Rig, subject: Subject, amounts: Amounts, say: Say) -> Flow:
    """Measure short texts through a worker whose engine computes nothing."""
    short = [" ".join(text.split()[:SHORT_WORDS]) for text in subject.texts]
    texts = [f"{short[i % len(short)]} {i}" for i in range(amounts.null_requests)]  # no two are equal
    flow = Flow()
    settings = subject.settings() | {"engine": "null"}
    with rig.worker("null", subject.core, **settings) as worker:
        score_all(rig, worker, texts[:WARM_UP], Flow(), options=subject.options, window=NULL_WINDOW)
        for number in range(1, amounts.rounds + 1):
            say(f"null engine: round {number} of {amounts.rounds}")
            score_all(rig, worker, texts, flow, options=subject.options, window=NULL_WINDOW)
    return flow
