"""The linear layers of an ONNX graph in int8, written so that onnxruntime multiplies integers.

Multiplications by constant weights are quantized, and tables that rows are taken from. What goes into a
multiplication is rounded to unsigned bytes, the weights to signed ones with one scale a column. What comes
out is a float, so that bias, normalisation, softmax and the multiplications inside the attention stay as they
were. onnxruntime joins the pattern DequantizeLinear (of both) -> MatMul to one integer kernel; it has fast
ones for unsigned by signed bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gristmill_worker.models.graph_builder import save_model
from gristmill_worker.models.manifest import MODEL_FILE, ModelRefusedError

WEIGHT_BITS: Final = {False: 127, True: 63}  # largest integer by reduce_range
_SMALLEST: Final = np.finfo(np.float32).tiny
_ROW_ZERO_POINT: Final = 128
_TABLE_ROWS: Final = 64  # fewer are not worth it
_AXES_ARE_INPUTS: Final = 18  # from this opset on


@dataclass(frozen=True, slots=True)
class Range:
    """What values an activation takes; the same for every batch."""

    low: float
    high: float

    def scale_and_zero_point(self) -> tuple[float, int]:
        """Return those of unsigned bytes; zero itself is represented exactly."""
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        scale = max((high - low) / 255, float(_SMALLEST))
        return scale, round(-low / scale)


class Rows:
    """Every token's vector is scaled by its own largest value."""


class Batch:
    """One range for all the batch: a text's answer depends on its neighbours."""


Activation = Range | Rows | Batch


@dataclass(frozen=True, slots=True)
class Layer:
    """One multiplication by a constant weight."""

    name: str  # of the node's output
    source: str  # of what is multiplied, (..., rows)
    weight: str  # (rows, columns)


def linear_layers(model: ModelProto) -> list[Layer]:
    """Return the multiplications of the graph by 2-D constant weights of float32, in order."""
    weights = {name for name, tensor in _constants(model).items() if _is_matrix(tensor)}
    return [
        Layer(node.output[0], node.input[0], node.input[1])
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in weights and node.input[0] not in weights
    ]


def quantized(model: ModelProto, activations: Mapping[str, Activation], *, reduce_range: bool) -> ModelProto:
    """Return ``model`` with the layers that ``activations`` names in int8, and its tables.

    ``reduce_range`` keeps weights to 7 bits, so that sums of two products fit into 16: CPUs without VNNI
    instructions add them in that width and saturate silently.
    """
    layers = {layer.name: layer for layer in linear_layers(model) if layer.name in activations}
    arrays = _constants(model)
    tables = {name for name, tensor in arrays.items() if _is_matrix(tensor) and tensor.dims[0] >= _TABLE_ROWS}
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    out = _Rewriter(WEIGHT_BITS[reduce_range], opset)
    for node in model.graph.node:
        layer = layers.get(node.output[0])
        if layer is not None:
            out.layer(layer, numpy_helper.to_array(arrays[layer.weight]), activations[layer.name])
        elif activations and _takes_rows(node, tables):
            out.lookup(node, numpy_helper.to_array(arrays[node.input[0]]))
        else:
            out.nodes.append(node)
    used = {name for node in out.nodes for name in node.input} | {value.name for value in model.graph.output}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    nodes = [node for node in out.nodes if node.op_type != "Constant" or node.output[0] in used]
    graph = helper.make_graph(
        nodes, model.graph.name, model.graph.input, model.graph.output, [*kept, *out.initializers]
    )
    made = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    made.producer_name = model.producer_name
    made.functions.extend(model.functions)
    return made


def quantize_weight(
    weight: NDArray[np.float32], largest: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return ``weight`` (rows, columns) as signed integers up to ``largest``, and each column's scale."""
    scale = np.maximum(np.abs(weight).max(axis=0) / largest, _SMALLEST).astype(np.float32)  # (columns,)
    return np.clip(np.rint(weight / scale), -largest, largest).astype(np.int8), scale


class _Rewriter:
    """Collects nodes and constants. What goes into several layers is quantized once."""

    def __init__(self, largest: int, opset: int) -> None:
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._largest = largest
        self._opset = opset
        self._names: set[str] = set()

    def layer(self, layer: Layer, weight: NDArray[np.float32], activation: Activation) -> None:
        integers, scale = quantize_weight(weight, self._largest)
        name = f"{layer.weight}/int8"
        weights = [
            self._constant(name, integers),
            self._constant(f"{name}/scale", scale),
            self._constant(f"{name}/zero", np.zeros(scale.shape, np.int8)),
        ]
        match activation:
            case Range():
                x = self._dequantized(layer, self._static(layer.source, activation))
                self._multiply(layer, x, weights, layer.name)
            case Rows():
                x = self._dequantized(layer, self._rows(layer.source))
                product = self._multiply(layer, x, weights, f"{layer.name}/of_rows")
                self._op("Mul", [product, f"{layer.source}/largest"], layer.name)
            case Batch():
                x = self._dequantized(layer, self._batch(layer.source))
                self._multiply(layer, x, weights, layer.name)

    def lookup(self, node: NodeProto, table: NDArray[np.float32]) -> None:
        """Take rows of integers, and of one scale a row."""
        name, indices = node.input[0], node.input[1]
        integers, scale = quantize_weight(table.T, 127)
        rows = self._constant(f"{name}/int8", np.ascontiguousarray(integers.T))  # (rows, columns)
        scales = self._constant(f"{name}/int8/scale", scale[:, None])  # (rows, 1)
        output = node.output[0]
        taken = self._op("Gather", [rows, indices], f"{output}/int8", axis=0)
        wide = self._op("Cast", [taken], f"{output}/float", to=TensorProto.FLOAT)
        self._op("Mul", [wide, self._op("Gather", [scales, indices], f"{output}/scale", axis=0)], output)

    def _multiply(self, layer: Layer, x: str, weights: list[str], name: str) -> str:
        weight = self._op("DequantizeLinear", weights, f"{layer.name}/weight", axis=1)
        return self._op("MatMul", [x, weight], name)

    def _dequantized(self, layer: Layer, parts: list[str]) -> str:
        return self._op("DequantizeLinear", parts, f"{layer.name}/input")

    def _static(self, source: str, activation: Range) -> list[str]:
        scale, zero_point = activation.scale_and_zero_point()
        return self._quantize_linear(source, f"{source}/static", scale, zero_point)

    def _rows(self, source: str) -> list[str]:
        name = f"{source}/in_rows"
        largest = f"{source}/largest"
        if largest not in self._names:
            size = self._op("Abs", [source], f"{source}/size")
            found = self._reduce_max(size, f"{source}/found")
            self._op("Max", [found, self._constant("int8/smallest", np.float32(1e-30))], largest)
            self._op("Div", [source, largest], name)
        return self._quantize_linear(name, name, 1 / (255 - _ROW_ZERO_POINT), _ROW_ZERO_POINT)

    def _reduce_max(self, values: str, name: str) -> str:
        if self._opset < _AXES_ARE_INPUTS:
            return self._op("ReduceMax", [values], name, axes=[-1], keepdims=1)
        last = self._constant("int8/last_axis", np.array([-1], np.int64))
        return self._op("ReduceMax", [values, last], name, keepdims=1)

    def _batch(self, source: str) -> list[str]:
        parts = [f"{source}/batch/{part}" for part in ("uint8", "scale", "zero")]
        if parts[0] not in self._names:
            self._names.add(parts[0])
            self.nodes.append(helper.make_node("DynamicQuantizeLinear", [source], parts))
        return parts

    def _quantize_linear(self, values: str, prefix: str, scale: float, zero_point: int) -> list[str]:
        constants = [
            self._constant(f"{prefix}/scale", np.float32(scale)),
            self._constant(f"{prefix}/zero", np.uint8(zero_point)),
        ]
        name = f"{prefix}/uint8"
        if name not in self._names:
            self._op("QuantizeLinear", [values, *constants], name)
        return [name, *constants]

    def _op(self, kind: str, inputs: Iterable[str], name: str, **attributes: Any) -> str:
        self._names.add(name)
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def _constant(self, name: str, value: Any) -> str:
        if name not in self._names:
            self._names.add(name)
            self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def _constants(model: ModelProto) -> dict[str, TensorProto]:
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                found[node.output[0]] = attribute.t
    return found


def _takes_rows(node: NodeProto, tables: set[str]) -> bool:
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    return node.op_type == "Gather" and axis == 0 and node.input[0] in tables


def _is_matrix(tensor: TensorProto) -> bool:
    return tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2


def layers_to_quantize(model: ModelProto) -> list[Layer]:
    """Return :func:`linear_layers`; raise :class:`ModelRefusedError` if there are none."""
    if layers := linear_layers(model):
        return layers
    raise ModelRefusedError("the graph has no MatMul by a constant matrix of float32: nothing to quantize")


def weights_note(reduce_range: bool) -> str:
    """Return how weights are kept, for people."""
    return f"{7 if reduce_range else 8}-bit signed weights with a range a column"


def save_form(model: ModelProto, folder: Path) -> str:
    """Write the graph into ``folder`` and return the file's name."""
    names = save_model(model, folder / MODEL_FILE)
    if len(names) > 1:
        raise ModelRefusedError("the quantized graph is larger than 2 GiB, which is not supported")
    return names[0]
