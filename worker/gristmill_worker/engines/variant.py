"""One way to run a model: an engine, one of the model's forms, and what floats are computed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill_worker.cpus import cpu_model
from gristmill_worker.engines.base import MEMORY_MB, Engine, EngineOptions, Floats, Shape, engine_loader
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.models.records import RunKey, engine_version


def precision_of(manifest: Manifest, floats: Floats) -> str:
    """Return e.g. ``fp32``, ``bf16``, ``int8`` or ``int8+bf16`` for a form and what its floats become."""
    if floats == "fp32":
        return manifest.precision
    return floats if manifest.precision == "fp32" else f"{manifest.precision}+{floats}"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the model in ``model_dir``; ``manifest`` is of ``form`` alone."""

    model_dir: Path
    engine: str
    form: str
    manifest: Manifest
    floats: Floats = "fp32"

    @property
    def precision(self) -> str:
        """See :func:`precision_of`."""
        return precision_of(self.manifest, self.floats)

    def run_key(self) -> RunKey:
        """Return what records of this variant on this CPU are kept under."""
        return RunKey(
            cpu=cpu_model(),
            engine=self.engine,
            engine_version=engine_version(self.engine),
            precision=self.precision,
            model=self.manifest.digest,
        )

    def load(
        self,
        shapes: Sequence[Shape],
        threads: int,
        *,
        memory_mb: int = MEMORY_MB,
        cache_dir: Path | None = None,
    ) -> Engine:
        """Load it; see :class:`~gristmill_worker.engines.base.LoadEngine` and ``EngineOptions``."""
        options = EngineOptions(threads, self.floats, memory_mb, cache_dir)
        return engine_loader(self.engine)(self.model_dir, self.manifest, shapes, options)

    def __str__(self) -> str:
        """E.g. ``openvino int8-openvino (int8+bf16)``."""
        return f"{self.engine} {self.form} ({self.precision})"
