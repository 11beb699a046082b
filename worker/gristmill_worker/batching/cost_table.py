"""The table of measured costs beside a model: one file for each CPU model, engine, precision and threads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gristmill_worker.engines.base import Shape
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models.records import RunKey, load_record, save_record

Size = Annotated[int, Field(ge=1, le=2**20)]


class CostKey(RunKey):
    """What the costs were measured with."""

    threads: int = Field(ge=1)


def cost_key(variant: Variant, threads: int) -> CostKey:
    """Return the key for ``variant`` on this CPU."""
    return CostKey(threads=threads, **variant.run_key().model_dump())


class Measurement(BaseModel):
    """The median of ``runs`` timed runs of one shape, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: tuple[Size, Size]  # (batch, sequence)
    seconds: float = Field(ge=1e-7, le=1e5)
    runs: int = Field(ge=1)


class CostTable(BaseModel):
    """Measured costs. What is between them is fitted when it is asked for, and never stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    key: CostKey
    measurements: tuple[Measurement, ...] = Field(min_length=1)
    speed: float | None = None  # relative to other variants, from measurements in turns with them
    shapes: tuple[tuple[Size, Size], ...] = ()  # chosen for the texts that the model was tuned with

    @property
    def measured(self) -> dict[Shape, float]:
        """Seconds of one batch by (batch, sequence)."""
        return {entry.shape: entry.seconds for entry in self.measurements}


def load_costs(model_dir: Path, key: CostKey) -> CostTable | None:
    """Return the table that was stored for ``key``; None if there is none that can be used."""
    table = load_record(costs_path(model_dir, key), CostTable)
    return table if table is not None and table.key == key else None


def save_costs(model_dir: Path, table: CostTable) -> Path:
    """Store ``table`` in the model directory, replacing the one of the same key; return its path.

    Raises :class:`InputFileError` where the directory cannot be written.
    """
    path = costs_path(model_dir, table.key)
    save_record(path, table)
    return path


def costs_path(model_dir: Path, key: CostKey) -> Path:
    """Return where the table for ``key`` is kept."""
    return model_dir / key.file_name("costs")
