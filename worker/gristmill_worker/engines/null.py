"""An engine that computes nothing: what is left of a worker's time with it is the queue's overhead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gristmill_worker.engines.base import Array, Engine, EngineOptions, Shape, concrete
from gristmill_worker.models.manifest import Manifest


class NullEngine:
    """Answers zeros of the model's output shapes at once."""

    name = "null"
    precision = "none"

    def __init__(self, manifest: Manifest, shapes: Sequence[Shape]) -> None:
        self.shapes = tuple(shapes)
        self._outputs = {
            shape: {out.name: np.zeros(concrete(out, shape), out.dtype) for out in manifest.outputs}
            for shape in shapes
        }
        self._input = manifest.inputs[0]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See :meth:`~gristmill_worker.engines.base.Engine.run`; all callers share the same zeros."""
        given = inputs[self._input.name].shape
        return self._outputs[given[0], given[1] if len(given) > 1 else 1]

    def close(self) -> None:
        """Nothing to release."""


def load(model_dir: Path, manifest: Manifest, shapes: Sequence[Shape], options: EngineOptions) -> Engine:  # noqa: ARG001
    """Return the engine for one model's shapes."""
    return NullEngine(manifest, shapes)
