"""Running many texts through one model directory, as a worker would: the same task, planner and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.errors import InputFileError
from gristmill_worker.batching.costs import formula
from gristmill_worker.batching.planner import Batch, plan
from gristmill_worker.batching.shapes import SEQUENCES, default_shapes
from gristmill_worker.engines.base import Array, Engine, EngineOptions, Shape, engine_loader
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.tasks.base import Encoded, ItemError, Task

Progress = Callable[[int], None]  # told how many more texts are done
Convert = Callable[[Mapping[str, Array], Sequence[Encoded]], Iterable[Any]]


def run_texts(
    model_dir: Path,
    manifest: Manifest,
    task: Task,
    bodies: Sequence[Mapping[str, Any]],
    convert: Convert,
    threads: int,
    progress: Progress | None = None,
) -> list[Any]:
    """Return one value per request body: what ``convert`` makes of a batch's outputs and items.

    Texts are sorted by length into batches. Raises :class:`InputFileError` for a text that cannot be encoded.
    """
    items: list[Encoded] = []
    for body, item in zip(bodies, task.encode(bodies), strict=True):
        if isinstance(item, ItemError):
            raise InputFileError(f"the text {str(body.get('text'))[:60]!r} cannot be used: {item.message}")
        items.append(item)
    shapes = default_shapes(manifest.max_length)
    # Only the shapes in use are prepared.
    used = sorted({batch.shape for batch in plan_items(items, shapes)})
    engine = engine_loader("onnxruntime")(model_dir, manifest, used, EngineOptions(threads))
    try:
        return run_items(engine, task, items, convert, progress)
    finally:
        engine.close()


def shapes_for(items: Sequence[Encoded], batch: int) -> list[Shape]:
    """Return the shapes of ``batch`` rows that ``items`` (at least one) run in."""
    longest = max(item.length for item in items)
    shapes = [(batch, sequence) for sequence in (*(size for size in SEQUENCES if size < longest), longest)]
    return sorted({each.shape for each in plan_items(items, shapes)})


def plan_items(items: Sequence[Encoded], shapes: Sequence[Shape]) -> list[Batch]:
    """Return the batches that a worker with ``shapes`` and no measured costs would run ``items`` in."""
    return plan([item.length for item in items], shapes, formula(shapes))


def run_items(
    engine: Engine,
    task: Task,
    items: Sequence[Encoded],
    convert: Convert,
    progress: Progress | None = None,
) -> list[Any]:
    """Return one value per item, run in batches of the engine's shapes; raises EngineError."""
    values: list[Any] = [None] * len(items)
    if not items:
        return values
    for batch in plan_items(items, engine.shapes):
        chosen = [items[index] for index in batch.items]
        outputs = engine.run(task.assemble(chosen, batch.shape))
        for index, value in zip(batch.items, convert(outputs, chosen), strict=True):
            values[index] = value
        if progress is not None:
            progress(len(chosen))
    return values
