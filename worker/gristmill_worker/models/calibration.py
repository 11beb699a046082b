"""Which values pass through a graph: what static quantization needs to know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from gristmill.errors import InputFileError
from gristmill_worker.engines.base import Array
from gristmill_worker.models.manifest import ModelRefusedError

Batch = Mapping[str, Array]  # the graph's inputs, each (rows, tokens), without padding
Range = tuple[float, float]  # least and largest value
ChannelRange = tuple[NDArray[np.float32], NDArray[np.float32]]  # the same for each channel: (channels,) each

_WARNINGS_OFF = 3


def activation_ranges(
    model_path: Path, names: Sequence[str], batches: Iterable[Batch], *, threads: int = 1
) -> dict[str, Range]:
    """Return the least and the largest value of each named value of the graph over ``batches``.

    See :func:`channel_ranges` for what is raised.
    """
    ranges = channel_ranges(model_path, names, batches, threads=threads)
    return {name: (float(low.min()), float(high.max())) for name, (low, high) in ranges.items()}


def channel_ranges(
    model_path: Path, names: Sequence[str], batches: Iterable[Batch], *, threads: int = 1
) -> dict[str, ChannelRange]:
    """Return the same for each channel, i.e. each index of the last dimension.

    Padding would count like text, so ``batches`` have none. Raises :class:`InputFileError` where there are no
    batches, :class:`ModelRefusedError` where the graph does not run, lacks a name or answers NaN or infinity.
    """
    session = _session(model_path, names, threads)
    ranges: dict[str, ChannelRange] = {}
    for batch in batches:
        for name, value in zip(names, _run(session, names, batch), strict=True):
            flat = value.reshape(-1, value.shape[-1])  # (rows * tokens, channels)
            low, high = flat.min(axis=0), flat.max(axis=0)
            if name in ranges:
                low, high = np.minimum(low, ranges[name][0]), np.maximum(high, ranges[name][1])
            ranges[name] = (low, high)
    if not ranges and names:
        raise InputFileError("there is no text to calibrate with")
    for name, (low, high) in ranges.items():
        if not np.isfinite([low, high]).all():
            raise ModelRefusedError(f"{name!r} is not finite for every text: the model cannot be quantized")
    return ranges


def _session(model_path: Path, names: Sequence[str], threads: int) -> onnxruntime.InferenceSession:
    """Load the graph with ``names`` as its outputs."""
    try:
        model = onnx.load(model_path, load_external_data=False)
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _WARNINGS_OFF
        options.intra_op_num_threads = threads
        # Weights in other files stand beside the model, and not beside what is only in memory here.
        folder = str(model_path.absolute().parent)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # those of onnx, protobuf and onnxruntime share no base class
        raise ModelRefusedError(f"{model_path} cannot be calibrated: {error}") from error


def _run(session: onnxruntime.InferenceSession, names: Sequence[str], batch: Batch) -> list[Any]:
    try:
        values: list[Any] = session.run(list(names), dict(batch))
    except Exception as error:  # onnxruntime's errors share no base class of their own
        raise ModelRefusedError(f"the graph failed on a text: {error}") from error
    return values
