"""OpenVINO on the CPU: fixed compilations of the first shapes, one dynamic compilation for all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openvino as ov

from gristmill_worker.engines.base import (
    Array,
    ByShape,
    Engine,
    EngineError,
    EngineOptions,
    Shape,
    check_names,
    concrete,
    warm_up,
)
from gristmill_worker.engines.variant import precision_of
from gristmill_worker.memory import resident_mb
from gristmill_worker.models.manifest import Manifest, ModelRefusedError

_HINTS = {"fp32": "f32", "bf16": "bf16"}


class OpenVinoEngine:
    """See :class:`~gristmill_worker.engines.base.Engine`; ``fixed`` shapes have their own compilation."""

    name = "openvino"

    def __init__(
        self, manifest: Manifest, precision: str, requests: Mapping[Shape, Any], fixed: Sequence[Shape]
    ) -> None:
        self.precision = precision
        self.shapes = tuple(requests)
        self.fixed = tuple(fixed)
        self._inputs = manifest.inputs
        self._outputs = tuple(tensor.name for tensor in manifest.outputs)
        self._requests = ByShape(manifest.inputs, requests)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch; see :meth:`~gristmill_worker.engines.base.Engine.run`."""
        request = self._requests.find(inputs)
        try:
            # infer() drops errors, and the outputs are then those of an earlier batch: only wait() raises
            # them. The request reads the arrays in place: they outlive it.
            request.start_async({each.name: inputs[each.name] for each in self._inputs}, share_inputs=True)
            request.wait()
            return {name: request.get_tensor(name).data.copy() for name in self._outputs}
        except Exception as error:  # OpenVINO raises RuntimeError for all there is
            raise EngineError.of(self.name, error) from error

    def close(self) -> None:
        """Release the compiled models."""
        self._requests.clear()


def load(model_dir: Path, manifest: Manifest, shapes: Sequence[Shape], options: EngineOptions) -> Engine:
    """Compile single shapes until the process has grown by ``memory_mb``; the others share one compilation.

    All compilations come from one model in memory, so that each adds little more than the weights of its
    matrix multiplications. A shared, dynamic compilation takes longer to run wherever the shape changes.
    """
    path = model_dir / manifest.file
    core = ov.Core()
    config = {
        "INFERENCE_PRECISION_HINT": _HINTS[options.floats],  # OpenVINO's own choice is bf16 where it can
        "INFERENCE_NUM_THREADS": options.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,  # the process is bound already
    }
    if options.cache_dir is not None:
        config["CACHE_DIR"] = str(options.cache_dir)
    try:
        model = core.read_model(path)
        _check_signature(model, manifest)
        requests: dict[Shape, Any] = {}
        before = resident_mb()
        for shape in shapes:
            if resident_mb() - before >= options.memory_mb:
                break
            fixed = model.clone()
            fixed.reshape({tensor.name: list(concrete(tensor, shape)) for tensor in manifest.inputs})
            requests[shape] = core.compile_model(fixed, "CPU", config).create_infer_request()
        compiled = tuple(requests)
        if rest := [shape for shape in shapes if shape not in requests]:
            request = core.compile_model(model, "CPU", config).create_infer_request()
            requests |= dict.fromkeys(rest, request)
        engine = OpenVinoEngine(manifest, precision_of(manifest, options.floats), requests, compiled)
        warm_up(engine, manifest.inputs)
    except ModelRefusedError:
        raise
    except Exception as error:  # as above
        raise ModelRefusedError(f"openvino {ov.__version__} cannot run {path}: {error}") from error
    return engine


def _check_signature(model: Any, manifest: Manifest) -> None:
    for found, declared in ((model.inputs, manifest.inputs), (model.outputs, manifest.outputs)):
        names = {name for port in found for name in port.get_names()}
        check_names(names, declared)
