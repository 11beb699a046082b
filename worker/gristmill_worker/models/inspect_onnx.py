"""What an ONNX graph is: inputs and outputs, the files it needs, precision, sparsity; and whether it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, external_data_helper, helper, numpy_helper

from gristmill_worker.engines.base import Array, Shape, example_inputs
from gristmill_worker.models.manifest import Dim, ModelRefusedError, Tensor

_QUANTIZED = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "QLinearMatMul",
        "ConvInteger",
        "QLinearConv",
        "QAttention",
        "QGemm",
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat",
    }
)
# Matrix multiplications: the positions of the weight, and of its zero point if it is quantized.
_MULTIPLICATIONS = {"MatMul": (1, None), "Gemm": (1, None), "MatMulInteger": (1, 3), "QLinearMatMul": (3, 5)}
# Two unlike shapes: a dimension that follows the batch or the sequence shows itself by changing with it.
_PROBES: Sequence[Shape] = ((2, 7), (3, 11))
_PADDING_TOLERANCE = 1e-3


def read_graph(path: Path) -> ModelProto:
    """Load a graph with its external data; raise :class:`ModelRefusedError` if that fails."""
    try:
        return onnx.load(path)
    except Exception as error:  # of onnx, protobuf or the file system
        raise ModelRefusedError(f"{path} cannot be read as an ONNX model: {error}") from error


def external_files(path: Path) -> list[str]:
    """Return the names of the files beside ``path`` that hold its weights.

    Raises :class:`ModelRefusedError` if one lies elsewhere.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:
        raise ModelRefusedError(f"{path} cannot be read as an ONNX model: {error}") from error
    names = {
        entry.value
        for tensor in _tensors(model)
        if external_data_helper.uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    if outside := [name for name in names if Path(name).name != name]:
        raise ModelRefusedError(f"{path} keeps weights outside of its folder: {outside[0]!r}")
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise ModelRefusedError(f"{path} needs the file {missing[0]!r} beside it, which is missing")
    return sorted(names)


def graph_inputs(model: ModelProto) -> tuple[Tensor, ...]:
    """Return the inputs: the first dimension is the batch, a free second one the sequence.

    Raises :class:`ModelRefusedError` for a fixed batch and for other free dimensions.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    return tuple(_input(value) for value in model.graph.input if value.name not in weights)


def _input(value: onnx.ValueInfoProto) -> Tensor:
    kind = value.type.tensor_type
    free = [not dim.HasField("dim_value") or dim.dim_value < 1 for dim in kind.shape.dim]
    if not free or not free[0]:
        raise ModelRefusedError(
            f"the batch dimension of input {value.name!r} is fixed: export the model with dynamic axes"
        )
    if any(free[2:]):
        raise ModelRefusedError(f"input {value.name!r} has a free dimension beyond (batch, sequence)")
    shape: list[Dim] = ["batch"]
    for position, dim in enumerate(kind.shape.dim[1:], start=1):
        shape.append("sequence" if free[position] else dim.dim_value)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    return Tensor(name=value.name, dtype=dtype, shape=tuple(shape))


def precision(model: ModelProto) -> str:
    """Return ``int8`` for a quantized graph, ``fp16`` or ``bf16`` if most weights are, else ``fp32``."""
    if any(node.op_type in _QUANTIZED for node in model.graph.node):
        return "int8"
    names = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
    sizes = dict.fromkeys(names.values(), 0)
    for tensor in _tensors(model):
        for kind, name in names.items():
            if tensor.data_type == kind:
                sizes[name] += int(np.prod(tensor.dims))
    return max(sizes, key=lambda name: sizes[name])


def sparsity(model: ModelProto) -> float:
    """Return the share of zeros (zero points, if quantized) in the 2-D weights of matrix multiplications."""
    arrays = {tensor.name: tensor for tensor in _tensors(model)}
    dequantized = {node.output[0]: node for node in model.graph.node if node.op_type == "DequantizeLinear"}
    zeros = total = 0
    for node in model.graph.node:
        if node.op_type not in _MULTIPLICATIONS:
            continue
        weight, zero_point = (_input_name(node, position) for position in _MULTIPLICATIONS[node.op_type])
        if weight in dequantized:
            source = dequantized[weight]
            weight, zero_point = _input_name(source, 0), _input_name(source, 2)
        if weight not in arrays or len(arrays[weight].dims) != 2:
            continue
        values = numpy_helper.to_array(arrays[weight])
        zero = numpy_helper.to_array(arrays[zero_point]) if zero_point in arrays else values.dtype.type(0)
        zeros += int(np.count_nonzero(values == zero))
        total += values.size
    return round(zeros / total, 4) if total else 0.0


def _input_name(node: NodeProto, position: int | None) -> str:
    return node.input[position] if position is not None and position < len(node.input) else ""


def _tensors(model: ModelProto) -> list[TensorProto]:
    constants = [
        attribute.t
        for node in model.graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    ]
    return [*model.graph.initializer, *constants]


class Probe:
    """A graph loaded to be tried before it is published."""

    def __init__(self, path: Path, inputs: Sequence[Tensor], threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4  # what fails is raised, and need not be printed as well
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's errors share no base class of their own
            raise ModelRefusedError(f"onnxruntime cannot load {path.name}: {_first_line(error)}") from error
        self._inputs = inputs
        self.output_names = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Array], names: Sequence[str] | None = None) -> dict[str, Any]:
        """Run one batch; raise :class:`ModelRefusedError` if it fails or an output is not finite."""
        try:
            values = self._session.run(names, dict(inputs))
        except Exception as error:
            raise ModelRefusedError(f"the model fails on a trial batch: {_first_line(error)}") from error
        outputs = dict(zip(names or self.output_names, values, strict=True))
        for name, value in outputs.items():
            if not isinstance(value, np.ndarray):
                raise ModelRefusedError(f"output {name!r} is not a tensor")
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise ModelRefusedError(f"output {name!r} holds NaN or infinity on a trial batch")
        return outputs

    def outputs(self) -> tuple[Tensor, ...]:
        """Run two batches and return the outputs whose first dimension is the batch.

        What varies is told from what is fixed by watching it vary: exports name their dimensions at will.
        """
        small, large = (self.run(_example(self._inputs, shape)) for shape in _PROBES)
        tensors = []
        for name in self.output_names:
            pairs = zip(small[name].shape, large[name].shape, strict=True)
            shape = tuple(_dimension(pair) for pair in pairs)
            if not shape or shape[0] != "batch" or None in shape:
                continue  # such as a hidden state that is not split by request
            dims = tuple(dim for dim in shape if dim is not None)
            tensors.append(Tensor(name=name, dtype=small[name].dtype.name, shape=dims))
        if not tensors:
            raise ModelRefusedError("no output of the model has the batch as its first dimension")
        return tuple(tensors)

    def run_longest(self, max_length: int, token_id: int = 0) -> None:
        """Run one item of ``max_length`` times ``token_id``: the manifest promises that every item works."""
        inputs = _example(self._inputs, (1, max_length))
        if "input_ids" in inputs:
            inputs["input_ids"][:] = token_id
        self.run(inputs)

    def check_padding(self, outputs: Sequence[Tensor], max_length: int, pad_token_id: int) -> None:
        """Raise :class:`ModelRefusedError` if an item is answered otherwise with padding behind it.

        Items of different lengths run in one batch, so padding has to be masked out or to be harmless.
        """
        size = min(_PROBES[0][1], max_length // 2)
        if size == 0 or not any("sequence" in tensor.shape for tensor in self._inputs):
            return
        answers = []
        for sequence in (size, 2 * size):
            inputs = example_inputs(self._inputs, (1, sequence))
            for tensor in self._inputs:
                if "sequence" in tensor.shape and tensor.name != "token_type_ids":
                    inputs[tensor.name][:] = pad_token_id if tensor.name == "input_ids" else 0
                    inputs[tensor.name][_first(tensor, size)] = 1
            answers.append(self.run(inputs, [tensor.name for tensor in outputs]))
        bare, padded = answers
        for tensor in outputs:
            found, expected = padded[tensor.name][_first(tensor, size)], bare[tensor.name]
            if not np.allclose(found, expected, rtol=_PADDING_TOLERANCE, atol=_PADDING_TOLERANCE):
                raise ModelRefusedError(
                    f"output {tensor.name!r} of an item changes when padding follows it: give the model "
                    "an attention_mask that it honours, or export it with a fixed sequence"
                )


def _first(tensor: Tensor, size: int) -> tuple[slice, ...]:
    return tuple(slice(size if dim == "sequence" else None) for dim in tensor.shape)


def _dimension(pair: tuple[int, int]) -> Dim | None:
    (batch, sequence), (more_batch, more_sequence) = _PROBES
    if pair == (batch, more_batch):
        return "batch"
    if pair == (sequence, more_sequence):
        return "sequence"
    return pair[0] if pair[0] == pair[1] else None


def _example(inputs: Sequence[Tensor], shape: Shape) -> dict[str, Array]:
    arrays = example_inputs(inputs, shape)
    for name, array in arrays.items():
        if "mask" in name and array.ndim == 2 and shape[0] > 1:
            array[-1, 1:] = 0  # one row is padding but for its first token
    return arrays


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
