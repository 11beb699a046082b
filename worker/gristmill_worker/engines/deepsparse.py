"""DeepSparse on the CPU: one compilation for each shape.

DeepSparse 1.8.0 is the last version that runs. It has been out of maintenance since June 2025, needs
Python < 3.12, x86-64 with AVX2, numpy < 2 and onnx < 1.15, and its licence allows evaluation, not production.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from gristmill.errors import InputFileError
from gristmill_worker.cpus import cpu_features
from gristmill_worker.engines.base import (
    Array,
    ByShape,
    Engine,
    EngineError,
    EngineOptions,
    Shape,
    check_names,
    concrete,
    example_inputs,
)
from gristmill_worker.memory import resident_mb
from gristmill_worker.models.manifest import Manifest, ModelRefusedError
from gristmill_worker.telemetry import logger

NAME: Final = "deepsparse"
VERSION: Final = "1.8.0"
INSTALL: Final = (
    "in an environment with Python 3.11 and without gristmill[models]: "
    "pip install 'gristmill[worker,deepsparse]'"
)
_LIMITS: Final = {"numpy": (2,), "onnx": (1, 15)}  # the library breaks from these versions on
_ABORTS: Final = frozenset({"DynamicQuantizeLinear"})  # the library ends the whole process on these


class DeepSparseEngine:
    """See :class:`~gristmill_worker.engines.base.Engine`."""

    name = NAME

    def __init__(self, manifest: Manifest, compiled: Mapping[Shape, Any]) -> None:
        self.precision = manifest.precision
        self.shapes = tuple(compiled)
        self._outputs = tuple(tensor.name for tensor in manifest.outputs)
        self._compiled = ByShape(manifest.inputs, compiled)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch; see :meth:`~gristmill_worker.engines.base.Engine.run`."""
        compiled = self._compiled.find(inputs)
        try:
            values = compiled.run([np.ascontiguousarray(inputs[name]) for name in compiled.input_names])
        except Exception as error:  # the library's errors share no base class of their own
            raise EngineError.of(self.name, error) from error
        outputs = dict(zip(compiled.output_names, values, strict=True))
        return {name: outputs[name] for name in self._outputs}

    def close(self) -> None:
        """Release the compilations."""
        self._compiled.clear()


def obstacle() -> str | None:
    """Return why DeepSparse cannot run here, and what to do; None if it can. Nothing of it is imported.

    Elsewhere its import ends the process by an unknown instruction, or fails in ways that say little.
    """
    return _obstacle_of_machine() or _obstacle_of_packages()


def _obstacle_of_machine() -> str | None:
    if sys.version_info >= (3, 12):
        found = ".".join(map(str, sys.version_info[:2]))
        return f"deepsparse needs Python 3.11, this is {found}: install it {INSTALL}"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"deepsparse runs on x86-64 Linux only, this is {platform.machine()} {sys.platform}"
    if "avx2" not in cpu_features():
        return "deepsparse needs a CPU with AVX2"
    if os.environ.get("NM_ARCH") == "avx512" and "avx512f" not in cpu_features():
        return "NM_ARCH asks deepsparse for AVX-512, which this CPU does not have: unset it"
    return None


def _obstacle_of_packages() -> str | None:
    try:
        found = {name: version(name) for name in ("deepsparse", *_LIMITS)}
    except PackageNotFoundError as error:
        return f"deepsparse needs a package that is missing ({error.name}): install it {INSTALL}"
    if found["deepsparse"] != VERSION:
        return f"deepsparse is {found['deepsparse']}, only {VERSION} runs: install it {INSTALL}"
    for name, limit in _LIMITS.items():
        if tuple(int(part) for part in found[name].split(".")[:2]) >= limit:
            bound = ".".join(map(str, limit))
            return f"deepsparse needs {name} < {bound}, this is {found[name]}: install it {INSTALL}"
    return None


def load(model_dir: Path, manifest: Manifest, shapes: Sequence[Shape], options: EngineOptions) -> Engine:
    """Compile the model for every shape and run each once.

    A shape takes seconds, and memory for weights of its own: raises :class:`InputFileError` where ``shapes``
    grow the process beyond ``options.memory_mb``.
    """
    if options.floats != "fp32":
        raise InputFileError(f"deepsparse computes floats in fp32 only, not in {options.floats}")
    _check_task(manifest)
    deepsparse = _library()
    path = model_dir / manifest.file
    names = _check_graph(path, manifest)
    tensors = {tensor.name: tensor for tensor in manifest.inputs}
    compiled: dict[Shape, Any] = {}
    before = resident_mb()
    try:
        # The library writes each shape into the file that it is given: it gets one of its own.
        with tempfile.TemporaryDirectory(prefix="gristmill-deepsparse-") as folder:
            copy = _private_copy(model_dir, manifest, Path(folder))
            for shape in dict.fromkeys(shapes):
                _check_growth(resident_mb() - before, options, compiled, shapes)
                compiled[shape] = deepsparse.Engine(
                    str(copy),
                    batch_size=shape[0],
                    num_cores=options.threads,  # never the default: all that the process may use
                    scheduler="single_stream",
                    input_shapes=[list(concrete(tensors[name], shape)) for name in names],
                )
        engine = DeepSparseEngine(manifest, compiled)
        for shape in compiled:
            engine.run(example_inputs(manifest.inputs, shape))
    except InputFileError:
        raise
    except Exception as error:  # RuntimeError, ValueError, AssertionError and protobuf's
        raise ModelRefusedError(f"deepsparse {VERSION} cannot run {path}: {error}") from error
    return engine


def _check_task(manifest: Manifest) -> None:
    """Raise :class:`ModelRefusedError` where a request could end the process."""
    integers = [tensor.name for tensor in manifest.inputs if np.issubdtype(tensor.dtype, np.integer)]
    if manifest.task == "tensors" and integers:
        raise ModelRefusedError(
            f"deepsparse ends the whole process on an index beyond the end of a table, and {integers[0]!r} "
            "comes from requests as it is: use onnxruntime"
        )


def _check_growth(
    grown_mb: float, options: EngineOptions, compiled: Mapping[Shape, Any], shapes: Sequence[Shape]
) -> None:
    if compiled and grown_mb >= options.memory_mb:
        raise InputFileError(
            f"deepsparse compiles each of {len(shapes)} shapes, and {len(compiled)} of them took "
            f"{options.memory_mb} MiB: name fewer in batch.shapes, or raise engine_memory_mb"
        )


@cache
def _library() -> Any:
    """Import DeepSparse where it can run, and say what its use means; once a process."""
    if (reason := obstacle()) is not None:
        raise InputFileError(reason)
    os.environ["NM_DISABLE_ANALYTICS"] = "1"
    # Threads stay on the cores that this process was given, and are spread over them by the kernel.
    os.environ["NM_BIND_THREADS_TO_CORES"] = os.environ["NM_BIND_THREADS_TO_SOCKETS"] = "0"
    try:
        import deepsparse  # noqa: PLC0415
    except Exception as error:  # ImportError, OSError, and those of its many dependencies
        raise InputFileError(f"deepsparse cannot be imported ({error}): install it {INSTALL}") from error
    logging.getLogger("deepsparse").setLevel(logging.ERROR)
    logger().warning(
        "deepsparse_notice",
        version=VERSION,
        licence="Neural Magic DeepSparse Community License: for evaluation, not for production use",
        maintenance="ended in June 2025: no fixes, also none of security",
        instructions=deepsparse.engine.AVX_TYPE + ("_vnni" if deepsparse.engine.VNNI else ""),
    )
    return deepsparse


def _check_graph(path: Path, manifest: Manifest) -> list[str]:
    """Return the names of the graph's inputs in its order.

    Raises :class:`ModelRefusedError`, also for what the library would end the process on.
    """
    import onnx  # noqa: PLC0415 - comes with deepsparse, and not with other engines

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except Exception as error:  # OSError and protobuf's
        raise ModelRefusedError(f"{path} is not an ONNX model: {error}") from error
    if bad := sorted({node.op_type for node in graph.node} & _ABORTS):
        raise ModelRefusedError(
            f"{path} has {bad[0]} (dynamic int8), which deepsparse cannot run: "
            "use the fp32 form, or one with static ranges"
        )
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in weights]
    check_names(inputs, manifest.inputs)
    check_names({value.name for value in graph.output}, manifest.outputs)
    if more := set(inputs) - {tensor.name for tensor in manifest.inputs}:
        raise ModelRefusedError(f"the graph needs {min(more)!r}, which the manifest does not name")
    return inputs


def _private_copy(model_dir: Path, manifest: Manifest, folder: Path) -> Path:
    """Copy the graph; weights in files of their own are only read, and linked."""
    for name in manifest.files:
        if name != manifest.file:
            (folder / name).symlink_to((model_dir / name).resolve())
    return Path(shutil.copyfile(model_dir / manifest.file, folder / manifest.file))
