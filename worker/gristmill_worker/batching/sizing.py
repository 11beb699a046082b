"""A worker's shapes and their costs, and whether others would suit the texts that it sees."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from gristmill_worker.batching.cost_table import cost_key, load_costs
from gristmill_worker.batching.costs import costs_of
from gristmill_worker.batching.shapes import (
    LengthCounter,
    better_shapes,
    candidate_shapes,
    check_shapes,
    default_shapes,
)
from gristmill_worker.engines import deepsparse
from gristmill_worker.engines.base import Shape
from gristmill_worker.engines.variant import Variant
from gristmill_worker.settings import Settings
from gristmill_worker.telemetry import logger

ADVISE_EVERY_S: Final = 600.0


@dataclass(slots=True)
class Sizing:
    """``shapes`` are those of the settings, else those that ``tune`` chose on this CPU, else a grid.

    ``costs`` holds them and ``candidates``; in seconds if ``measured``.
    """

    shapes: Sequence[Shape]
    candidates: Sequence[Shape]
    costs: Mapping[Shape, float]
    measured: bool
    max_length: int
    window: int
    lengths: LengthCounter = field(init=False)
    _advise_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = LengthCounter(self.max_length)
        self._advise_at = time.monotonic() + ADVISE_EVERY_S

    @classmethod
    def of(cls, settings: Settings, variant: Variant) -> Self:
        """Return the sizing for one variant on this CPU; raises InputFileError for unusable shapes."""
        batch, manifest = settings.batch, variant.manifest
        key = cost_key(variant, settings.threads)
        candidates = candidate_shapes(manifest.max_length, batch.max_tokens)
        table = load_costs(settings.model, key)
        stored = set(table.shapes) if table is not None else set()
        if batch.shapes:
            shapes = check_shapes(batch.shapes, manifest.max_length)
        elif stored <= set(candidates) and any(shape[1] == manifest.max_length for shape in stored):
            shapes = sorted(stored)
        else:  # nothing was tuned, or for other limits
            shapes = default_shapes(
                manifest.max_length, batch.max_tokens, few=variant.engine == deepsparse.NAME
            )
        costs, origin = costs_of(table, sorted({*shapes, *candidates}))
        return cls(shapes, candidates, costs, origin == "measured", manifest.max_length, batch.max_items)

    def advise(self) -> None:
        """Now and then, say when other shapes would save a tenth of the time; takes about a second then."""
        if not self.measured or time.monotonic() < self._advise_at:
            return
        self._advise_at = time.monotonic() + ADVISE_EVERY_S
        suggestion = better_shapes(
            self.lengths,
            self.shapes,
            self.candidates,
            self.costs,
            max_length=self.max_length,
            window=self.window,
        )
        if suggestion is not None:
            logger().warning(
                "other_shapes_are_better",
                saving=round(suggestion.saving, 3),
                hint="set batch.shapes, or run 'gristmill-worker tune' with --texts",
                shapes=[list(shape) for shape in suggestion.shapes],
            )
