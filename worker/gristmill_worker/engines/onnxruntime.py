"""onnxruntime on the CPU: one session, explicit threads, inputs bound once per shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from gristmill.errors import InputFileError
from gristmill_worker.engines.base import (
    Array,
    ByShape,
    Engine,
    EngineError,
    EngineOptions,
    Shape,
    check_names,
    example_inputs,
    warm_up,
)
from gristmill_worker.models.manifest import Manifest, ModelRefusedError

WARNING_LEVEL = 3  # onnxruntime's "error": its warnings are not for users


class OnnxRuntimeEngine:
    """See :class:`~gristmill_worker.engines.base.Engine`."""

    name = "onnxruntime"

    def __init__(self, session: Any, manifest: Manifest, shapes: Sequence[Shape]) -> None:
        self.precision = manifest.precision
        self.shapes = tuple(shapes)
        self._session = session
        self._manifest = manifest
        self._outputs = [output.name for output in manifest.outputs]
        self._bound = ByShape(manifest.inputs, {shape: self._bind(shape) for shape in shapes})

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch; see :meth:`~gristmill_worker.engines.base.Engine.run`."""
        binding, buffers = self._bound.find(inputs)
        try:
            for name, buffer in buffers.items():
                np.copyto(buffer, inputs[name])
            self._session.run_with_iobinding(binding)
            values = binding.copy_outputs_to_cpu()
        except Exception as error:  # onnxruntime's errors share no base class of their own
            raise EngineError.of(self.name, error) from error
        return dict(zip(self._outputs, values, strict=True))

    def close(self) -> None:
        """Release the session's memory."""
        self._bound.clear()
        self._session = None

    def _bind(self, shape: Shape) -> tuple[Any, dict[str, Array]]:
        """Let the session read its inputs of ``shape`` from buffers that stay."""
        binding = self._session.io_binding()
        buffers = example_inputs(self._manifest.inputs, shape)
        for name, buffer in buffers.items():
            binding.bind_cpu_input(name, buffer)
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        return binding, buffers


def load(model_dir: Path, manifest: Manifest, shapes: Sequence[Shape], options: EngineOptions) -> Engine:
    """Load the model and run a batch."""
    if options.floats != "fp32":
        raise InputFileError(f"onnxruntime computes floats in fp32 only, not in {options.floats}")
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads  # never the default: it ignores cpusets and cgroups
    settings.inter_op_num_threads = 1
    settings.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    settings.log_severity_level = WARNING_LEVEL
    try:
        session = ort.InferenceSession(
            str(model_dir / manifest.file), settings, providers=["CPUExecutionProvider"]
        )
        _check_signature(session, manifest)
        engine = OnnxRuntimeEngine(session, manifest, shapes)
        warm_up(engine, manifest.inputs)
    except ModelRefusedError:
        raise
    except Exception as error:  # onnxruntime raises a dozen unrelated classes
        raise ModelRefusedError(
            f"onnxruntime {ort.__version__} cannot run {model_dir / manifest.file}: {error}"
        ) from error
    return engine


def _check_signature(session: Any, manifest: Manifest) -> None:
    for found, declared in (
        (session.get_inputs(), manifest.inputs),
        (session.get_outputs(), manifest.outputs),
    ):
        check_names({node.name for node in found}, declared)
