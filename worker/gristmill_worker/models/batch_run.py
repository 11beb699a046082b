"""Running many texts through one model directory, as a worker would: the same task, planner and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.errors import InputFileError
from gristmill_worker.batching.costs import formula
from gristmill_worker.batching.planner import plan
from gristmill_worker.batching.shapes import default_shapes
from gristmill_worker.engines.base import Array, EngineOptions, engine_loader
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
    lengths = [item.length for item in items]
    shapes = default_shapes(manifest.max_length)
    batches = plan(lengths, shapes, formula(shapes))
    values: list[Any] = [None] * len(items)
    # Only the shapes in use are warmed up.
    used = sorted({batch.shape for batch in batches})
    engine = engine_loader("onnxruntime")(model_dir, manifest, used, EngineOptions(threads))
    try:
        for batch in batches:
            chosen = [items[index] for index in batch.items]
            outputs = engine.run(task.assemble(chosen, batch.shape))
            for index, value in zip(batch.items, convert(outputs, chosen), strict=True):
                values[index] = value
            if progress is not None:
                progress(len(chosen))
    finally:
        engine.close()
    return values
