"""The engine protocol and the table of engines."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Generic, Literal, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import GristmillError, InputFileError
from gristmill_worker.models.manifest import Manifest, ModelRefusedError, Tensor

T = TypeVar("T")
Array = NDArray[Any]
Shape = tuple[int, int]  # (batch, sequence)
Floats = Literal["fp32", "bf16"]

MEMORY_MB: Final = 1024


NO_MEMORY: Final = re.compile(r"bad.alloc|(failed to|cannot|could not) allocate|out of memory", re.IGNORECASE)


class EngineError(GristmillError):
    """The engine failed on a batch; the worker bisects it to find the request to blame.

    ``retryable`` says that the same batch may work later: what lacked was memory, which others may give back.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable

    @classmethod
    def of(cls, engine: str, error: Exception) -> Self:
        """Return the error for whatever the library behind ``engine`` raised in a run."""
        return cls(f"{engine} failed: {error}", retryable=may_pass(error))


def may_pass(error: Exception) -> bool:
    """Say whether what failed may work later.

    Libraries raise the C++ errors for memory as RuntimeError, so their words have to tell.
    """
    if isinstance(error, EngineError):
        return error.retryable
    return isinstance(error, MemoryError) or bool(NO_MEMORY.search(str(error)))


class Engine(Protocol):
    """One loaded model. Not thread-safe: one batch at a time."""

    name: str
    precision: str
    shapes: tuple[Shape, ...]  # a batch of any other shape is refused

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch of one of ``shapes``; the outputs belong to the caller. Raises EngineError."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a model; ``memory_mb`` and ``cache_dir`` are for engines that compile."""

    threads: int = 1
    floats: Floats = "fp32"  # what is computed in for all that the form leaves in floating point
    memory_mb: int = MEMORY_MB  # to grow by, for compilations of single shapes; 0: one dynamic compilation
    cache_dir: Path | None = None  # for what can be loaded faster the next time


class LoadEngine(Protocol):
    """``load`` of an engine's module: returns when a batch has run, see :func:`warm_up`.

    ``manifest`` is of one form. Where memory is short the first shapes get compilations of their own. Raises
    ModelRefusedError for a model that the engine cannot run, InputFileError for options or a CPU that it
    cannot run with.
    """

    def __call__(
        self, model_dir: Path, manifest: Manifest, shapes: Sequence[Shape], options: EngineOptions
    ) -> Engine: ...


ENGINES: Mapping[str, str] = {  # name -> the extra that installs it
    "openvino": "worker",
    "onnxruntime": "worker",
    "deepsparse": "worker,deepsparse",
    "null": "worker",
}
SHARED_COMPILATION: Final = "openvino"  # the engine that can run many shapes by one compilation


def engine_loader(name: str) -> LoadEngine:
    """Import the engine's module and return its ``load``; a missing library says what to install."""
    if name not in ENGINES:
        raise InputFileError(f"engine {name!r} is unknown: use one of {', '.join(ENGINES)}")
    try:
        module = import_module(f"gristmill_worker.engines.{name}")
    except ImportError as error:
        raise InputFileError(
            f"engine {name!r} needs a package that is missing ({error.name}): "
            f"pip install 'gristmill[{ENGINES[name]}]'"
        ) from error
    load: LoadEngine = module.load
    return load


class ByShape(Generic[T]):
    """What an engine keeps for each shape, found by the arrays of a batch."""

    def __init__(self, inputs: Sequence[Tensor], kept: Mapping[Shape, T]) -> None:
        self._inputs = inputs
        self._kept = {self._signature(example_inputs(inputs, shape)): value for shape, value in kept.items()}

    def find(self, inputs: Mapping[str, Array]) -> T:
        """Return what is kept; raise EngineError for dimensions or types that nothing is kept for."""
        try:
            return self._kept[self._signature(inputs)]
        except KeyError:
            found = {name: f"{array.dtype}{list(array.shape)}" for name, array in inputs.items()}
            raise EngineError(f"inputs {found} are of no shape that this engine was loaded for") from None

    def clear(self) -> None:
        """Let go of everything."""
        self._kept.clear()

    def _signature(self, inputs: Mapping[str, Array]) -> tuple[Any, ...]:
        return tuple((inputs[tensor.name].shape, inputs[tensor.name].dtype.str) for tensor in self._inputs)


def check_names(found: Collection[str], declared: Sequence[Tensor]) -> None:
    """Raise :class:`ModelRefusedError` if a graph lacks an input or output that the manifest names."""
    if missing := [tensor.name for tensor in declared if tensor.name not in found]:
        raise ModelRefusedError(
            f"the graph has no {missing[0]!r}, which the manifest names, but {', '.join(sorted(found))}"
        )


def concrete(tensor: Tensor, shape: Shape) -> tuple[int, ...]:
    """Return the tensor's dimensions at (batch, sequence)."""
    sizes = {"batch": shape[0], "sequence": shape[1]}
    return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape)


def warm_up(engine: Engine, inputs: Sequence[Tensor]) -> None:
    """Run the smallest shape once: what an engine prepares at its first run is ready for all of them.

    A first run at another shape took no longer than the second one, within the noise, in OpenVINO and
    onnxruntime; to run all shapes takes seconds, in which a worker that was lost is missing.
    """
    engine.run(example_inputs(inputs, min(engine.shapes, key=lambda shape: shape[0] * shape[1])))


def example_inputs(inputs: Sequence[Tensor], shape: Shape) -> dict[str, Array]:
    """Return valid inputs of ``shape`` for a warm-up: everything attended, all else zero."""
    return {
        tensor.name: np.full(concrete(tensor, shape), "mask" in tensor.name, dtype=tensor.dtype)
        for tensor in inputs
    }
