"""The engine protocol and the table of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import GristmillError, InputFileError
from gristmill_worker.models.manifest import Manifest, Tensor

Array = NDArray[Any]
Shape = tuple[int, int]  # (batch, sequence)


class EngineError(GristmillError):
    """The engine failed on a batch; the worker bisects it to find the request to blame."""


class Engine(Protocol):
    """One loaded model. Not thread-safe: one batch at a time."""

    name: str
    precision: str
    shapes: tuple[Shape, ...]  # warmed up; a batch of any other shape is refused

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch of one of ``shapes``; the outputs belong to the caller. Raises EngineError."""
        ...

    def close(self) -> None: ...


class LoadEngine(Protocol):
    """``load`` of an engine's module: returns when every shape has run once."""

    def __call__(
        self, model_dir: Path, manifest: Manifest, threads: int, shapes: Sequence[Shape]
    ) -> Engine: ...


ENGINES: Mapping[str, str] = {
    "onnxruntime": "gristmill_worker.engines.onnxruntime",
    "null": "gristmill_worker.engines.null",
}


def engine_loader(name: str) -> LoadEngine:
    """Import the engine's module and return its ``load``; a missing library says what to install."""
    try:
        module = import_module(ENGINES[name])
    except KeyError:
        raise InputFileError(f"engine {name!r} is unknown: use one of {', '.join(sorted(ENGINES))}") from None
    except ImportError as error:
        raise InputFileError(
            f"engine {name!r} needs a package that is missing ({error.name}): pip install 'gristmill[worker]'"
        ) from error
    load: LoadEngine = module.load
    return load


def concrete(tensor: Tensor, shape: Shape) -> tuple[int, ...]:
    """Return the tensor's dimensions at (batch, sequence)."""
    sizes = {"batch": shape[0], "sequence": shape[1]}
    return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape)


def example_inputs(inputs: Sequence[Tensor], shape: Shape) -> dict[str, Array]:
    """Return valid inputs of ``shape`` for a warm-up: everything attended, all else zero."""
    return {
        tensor.name: np.full(concrete(tensor, shape), "mask" in tensor.name, dtype=tensor.dtype)
        for tensor in inputs
    }
