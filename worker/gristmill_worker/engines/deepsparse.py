"""DeepSparse on the CPU: one compiled engine for each shape.

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
from gristmill_worker.engines.base import Array, Engine, EngineError, Shape, concrete, example_inputs
from gristmill_worker.models.manifest import Manifest, ModelRefusedError
from gristmill_worker.telemetry import logger

VERSION: Final = "1.8.0"
INSTALL: Final = "pip install 'gristmill[worker,deepsparse]' with Python 3.11"
_CPU_INFO: Final = Path("/proc/cpuinfo")
_ABORTS: Final = frozenset({"DynamicQuantizeLinear"})  # the library ends the whole process on these


class DeepSparseEngine:
    """See :class:`~gristmill_worker.engines.base.Engine`."""

    name = "deepsparse"

    def __init__(self, compiled: Mapping[Shape, Any], manifest: Manifest) -> None:
        self.precision = manifest.precision
        self.shapes = tuple(compiled)
        self._manifest = manifest
        self._compiled = {self._signature(example_inputs(manifest.inputs, s)): e for s, e in compiled.items()}
        self._dtypes = {tensor.name: np.dtype(tensor.dtype) for tensor in manifest.inputs}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch; see :meth:`~gristmill_worker.engines.base.Engine.run`."""
        try:
            compiled = self._compiled[self._signature(inputs)]
        except KeyError:
            found = {name: array.shape for name, array in inputs.items()}
            raise EngineError(f"inputs {found} are of no shape that this engine was loaded for") from None
        if wrong := [name for name, dtype in self._dtypes.items() if inputs[name].dtype != dtype]:
            name = wrong[0]
            raise EngineError(f"input {name!r} is of {inputs[name].dtype}, not {self._dtypes[name]}")
        try:
            values = compiled.run([np.ascontiguousarray(inputs[name]) for name in compiled.input_names])
        except Exception as error:  # the library's errors share no base class of their own
            raise EngineError(f"deepsparse failed: {error}") from error
        outputs = dict(zip(compiled.output_names, values, strict=True))
        return {output.name: outputs[output.name] for output in self._manifest.outputs}

    def close(self) -> None:
        """Release the compiled engines' memory."""
        self._compiled.clear()

    def _signature(self, inputs: Mapping[str, Array]) -> tuple[tuple[int, ...], ...]:
        return tuple(inputs[tensor.name].shape for tensor in self._manifest.inputs)


def load(model_dir: Path, manifest: Manifest, threads: int, shapes: Sequence[Shape]) -> Engine:
    """Compile the model for every shape and run each once.

    A shape takes seconds and a copy of the weights in memory: load few. Raises :class:`InputFileError` where
    DeepSparse cannot run at all, :class:`ModelRefusedError` for a model that it cannot run.
    """
    deepsparse = _library()
    path = model_dir / manifest.file
    names = _check_graph(path, manifest)
    tensors = {tensor.name: tensor for tensor in manifest.inputs}
    compiled: dict[Shape, Any] = {}
    try:
        # The library writes each shape into the file that it is given: it gets one of its own.
        with tempfile.TemporaryDirectory(prefix="gristmill-deepsparse-") as folder:
            copy = _private_copy(model_dir, manifest, Path(folder))
            for shape in dict.fromkeys(shapes):
                compiled[shape] = deepsparse.Engine(
                    str(copy),
                    batch_size=shape[0],
                    num_cores=threads,  # never the default: it takes every core that the process may use
                    scheduler="single_stream",
                    input_shapes=[list(concrete(tensors[name], shape)) for name in names],
                )
        engine = DeepSparseEngine(compiled, manifest)
        for shape in compiled:
            engine.run(example_inputs(manifest.inputs, shape))
    except Exception as error:  # RuntimeError, ValueError, AssertionError and protobuf's
        raise ModelRefusedError(f"deepsparse {VERSION} cannot run {path}: {error}") from error
    return engine


@cache
def _library() -> Any:
    """Import DeepSparse where that cannot end the process, and say what its use means; once a process."""
    _check_platform()
    _check_packages()
    os.environ["NM_DISABLE_ANALYTICS"] = "1"
    # Threads stay on the cores that this process was given, and are spread over them by the kernel.
    os.environ["NM_BIND_THREADS_TO_CORES"] = os.environ["NM_BIND_THREADS_TO_SOCKETS"] = "0"
    try:
        import deepsparse  # noqa: PLC0415
    except Exception as error:  # ImportError, OSError, and those of its many dependencies
        raise InputFileError(f"deepsparse {VERSION} cannot be imported ({error}): {INSTALL}") from error
    logging.getLogger("deepsparse").setLevel(logging.ERROR)
    logger().warning(
        "deepsparse_notice",
        version=VERSION,
        licence="Neural Magic DeepSparse Community License: for evaluation, not for production use",
        maintenance="ended in June 2025: no fixes, also none of security",
        instructions=deepsparse.engine.AVX_TYPE + ("_vnni" if deepsparse.engine.VNNI else ""),
    )
    return deepsparse


def _check_platform() -> None:
    """Raise :class:`InputFileError` where the library has no build, or would meet unknown instructions."""
    if sys.version_info >= (3, 12):
        found = ".".join(map(str, sys.version_info[:2]))
        raise InputFileError(
            f"engine 'deepsparse' needs Python 3.11, this is {found}: give it an environment of its own "
            f"({INSTALL}); its workers serve the same queues"
        )
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise InputFileError(
            f"engine 'deepsparse' runs on x86-64 Linux only, this is {platform.machine()} {sys.platform}: "
            "use engine onnxruntime"
        )
    flags = _cpu_flags()
    if "avx2" not in flags:
        raise InputFileError("engine 'deepsparse' needs a CPU with AVX2: use engine onnxruntime")
    if os.environ.get("NM_ARCH") == "avx512" and "avx512f" not in flags:
        raise InputFileError("NM_ARCH asks DeepSparse for AVX-512, which this CPU does not have: unset it")


def _cpu_flags() -> frozenset[str]:
    for line in _CPU_INFO.read_text("utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _check_packages() -> None:
    """Raise :class:`InputFileError` for a missing or wrong version of the library, or of what it needs."""
    try:
        found = version("deepsparse")
    except PackageNotFoundError:
        raise InputFileError(f"engine 'deepsparse' needs a package that is missing: {INSTALL}") from None
    if found != VERSION:
        raise InputFileError(
            f"engine 'deepsparse' needs version {VERSION}, this is {found} (1.9.0 holds no engine): {INSTALL}"
        )
    for name, limit in (("numpy", (2,)), ("onnx", (1, 15))):
        found = version(name)
        if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) >= limit:
            bound = ".".join(map(str, limit))
            raise InputFileError(f"deepsparse {VERSION} needs {name} < {bound}, this is {found}: {INSTALL}")


def _check_graph(path: Path, manifest: Manifest) -> list[str]:
    """Return the names of the graph's inputs in its order; raise :class:`ModelRefusedError`.

    What the library would not answer with an error, but by ending the process, is refused here.
    """
    import onnx  # noqa: PLC0415 - the library's own dependency, and not that of other engines

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except Exception as error:  # OSError and protobuf's
        raise ModelRefusedError(f"{path} is not an ONNX model: {error}") from error
    if bad := sorted({node.op_type for node in graph.node} & _ABORTS):
        raise ModelRefusedError(
            f"{path} has {bad[0]} (dynamic int8), which deepsparse {VERSION} cannot run: "
            "use its fp32 form or one with static ranges"
        )
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in weights]
    outputs = {value.name for value in graph.output}
    declared = {tensor.name for tensor in manifest.inputs}
    if set(inputs) != declared:
        raise ModelRefusedError(
            f"the graph takes {', '.join(sorted(inputs))}, the manifest says {', '.join(sorted(declared))}"
        )
    if missing := [tensor.name for tensor in manifest.outputs if tensor.name not in outputs]:
        raise ModelRefusedError(f"the graph has no output {missing[0]!r}, which the manifest names")
    return inputs


def _private_copy(model_dir: Path, manifest: Manifest, folder: Path) -> Path:
    """Copy the graph; weights in files of their own are only read, and linked."""
    for name in manifest.files:
        if name != manifest.file:
            (folder / name).symlink_to((model_dir / name).resolve())
    return Path(shutil.copyfile(model_dir / manifest.file, folder / manifest.file))
