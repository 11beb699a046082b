"""Timing every variant of a model that this CPU can run against the others, at a few usual shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Final

from gristmill.errors import InputFileError
from gristmill_worker.batching.costs import usual_shapes
from gristmill_worker.cpus import cpu_features
from gristmill_worker.engines.base import (
    SHARED_COMPILATION,
    EngineError,
    Shape,
    engine_loader,
    example_inputs,
)
from gristmill_worker.engines.choice import Wanted, doubt_about, obstacle_to, variants
from gristmill_worker.engines.variant import Variant
from gristmill_worker.memory import resident_mb
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.tune.measure import Say

WORTH: Final = 0.03  # gain from which a compilation of its own is worth the memory
ROUNDS: Final = 5  # at least, whatever they take
_ENOUGH_MB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class VariantRow:
    """Median seconds of one batch by shape; ``doubt`` is why ``auto`` would not take the variant."""

    variant: Variant
    seconds: dict[Shape, float]
    runs: int  # of each shape
    doubt: str | None

    @property
    def texts_per_s(self) -> dict[Shape, float]:
        """Texts per second of each shape."""
        return {shape: shape[0] / seconds for shape, seconds in self.seconds.items()}

    @property
    def speed(self) -> float:
        """Texts per second over all shapes, as many texts of each."""
        return len(self.seconds) / sum(1.0 / rate for rate in self.texts_per_s.values())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Variants that were timed in turns, the fastest first, and what its engine ``refused``, with why."""

    rows: tuple[VariantRow, ...]
    refused: dict[str, str]

    def speed(self, variant: Variant) -> float | None:
        """Return how fast ``variant`` was, relative to the others; None if it was not timed."""
        return next((row.speed for row in self.rows if str(row.variant) == str(variant)), None)


def compare_variants(
    model_dir: Path, manifest: Manifest, wanted: Wanted, *, threads: int, seconds: float, say: Say
) -> Comparison:
    """Time what was asked for and can run here, in turns, for about ``seconds``.

    With a single variant nothing is timed.
    """
    found = [v for v in variants(model_dir, manifest, wanted) if obstacle_to(v, cpu_features()) is None]
    if len(found) < 2:
        return Comparison((), {})
    shapes = usual_shapes(manifest.max_length)
    times: dict[str, dict[Shape, list[float]]] = {}
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        engines = {}
        for variant in found:
            say(f"loading {variant}")
            try:
                engine = variant.load(shapes, threads)
            except (InputFileError, EngineError) as error:
                refused[str(variant)] = str(error)
                continue
            engines[str(variant)] = stack.enter_context(closing(engine))
            times[str(variant)] = {shape: [] for shape in shapes}
        say(f"comparing {len(engines)} ways to run the model")
        examples = {shape: example_inputs(manifest.inputs, shape) for shape in shapes}
        ends, turn = time.monotonic() + seconds, 0
        while engines and (turn < ROUNDS or time.monotonic() < ends):
            for name, engine in engines.items():
                for shape, example in examples.items():
                    started = time.perf_counter()
                    engine.run(example)
                    times[name][shape].append(time.perf_counter() - started)
            turn += 1
    rows = [
        VariantRow(
            variant,
            {shape: median(runs) for shape, runs in times[str(variant)].items()},
            turn,
            doubt_about(variant, manifest),
        )
        for variant in found
        if str(variant) in times
    ]
    return Comparison(tuple(sorted(rows, key=lambda row: row.speed, reverse=True)), refused)


@dataclass(frozen=True, slots=True)
class Compilations:
    """What single shapes gain by compilations of their own, and what that takes."""

    gains: dict[Shape, float]  # time in the compilation that all share / time in the shape's own, minus 1
    mb_per_shape: float

    @property
    def gain(self) -> float:
        """The median over the shapes."""
        return median(self.gains.values())

    def memory_mb(self, shapes: int) -> int:
        """Return ``engine_memory_mb`` for so many shapes: 0 where they gain next to nothing."""
        return 0 if self.gain < WORTH else ceil(self.mb_per_shape * (shapes + 1) / 64) * 64


def compare_compilations(
    variant: Variant, shapes: Sequence[Shape], *, threads: int, seconds: float, say: Say
) -> Compilations | None:
    """Time ``shapes`` in compilations of their own and in one for all, going from shape to shape in turns.

    None for an engine that knows no such difference.
    """
    if variant.engine != SHARED_COMPILATION:
        return None
    say(f"comparing compilations of {len(shapes)} shapes with one for all")
    engine_loader(variant.engine)  # the library is no memory of a shape
    with ExitStack() as stack:
        before = resident_mb()
        shared = stack.enter_context(closing(variant.load(shapes, threads, memory_mb=0)))
        between = resident_mb()
        own = stack.enter_context(closing(variant.load(shapes, threads, memory_mb=_ENOUGH_MB)))
        grown = resident_mb() - between - (between - before)
        times: dict[Shape, tuple[list[float], list[float]]] = {shape: ([], []) for shape in shapes}
        examples = {shape: example_inputs(variant.manifest.inputs, shape) for shape in shapes}
        ends, turn = time.monotonic() + seconds, 0
        while turn < ROUNDS or time.monotonic() < ends:
            for engine, at in ((shared, 0), (own, 1)):
                for shape, example in examples.items():
                    started = time.perf_counter()
                    engine.run(example)
                    times[shape][at].append(time.perf_counter() - started)
            turn += 1
    gains = {shape: median(both) / median(single) - 1.0 for shape, (both, single) in times.items()}
    # Both hold the model and one compilation.
    return Compilations(gains, max(grown, 0.0) / max(len(shapes) - 1, 1))
