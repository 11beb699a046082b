"""Static int8, with pruning if wanted: from an fp32 graph to the form that DeepSparse runs fastest.

Every matrix multiplication of token states by weights, with the bias that follows, becomes

    Mul (smoothing) -> QuantizeLinear (uint8) -> MatMulInteger (int8) -> Add (int32 bias) -> Cast -> Mul

Activations have one scale each, known from calibration, so that a text's result does not depend on the batch
that it runs in. Weights have a scale for each output. Smoothing (Xiao et al., SmoothQuant, 2022) divides each
channel of the activation by a factor that its row of weights takes over: some channels of a BERT are ten
times larger than the rest and would waste the range. Multiplications inside the attention stay fp32, and so
does the classification head, which sees one token only. LayerNormalization, which DeepSparse hands to another
runtime, is written as the operations that it consists of.

all-MiniLM-L6-v2, cosine to fp32 (mean / least of 128 texts): .998 / .996; without smoothing .994 / .988. One
scale for a whole matrix, .956 / .915, would make a sparse model a quarter faster and a dense one hardly.

Pruning removes the weights of least magnitude, without any training after it: accuracy does not survive the
shares that pay. It shows what a model that was trained to be sparse would gain in speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper, shape_inference

from gristmill_worker.models.calibration import Batch, ChannelRange, channel_ranges
from gristmill_worker.models.graph_builder import IR_VERSION, GraphBuilder
from gristmill_worker.models.manifest import ModelRefusedError
from gristmill_worker.models.pruning import Pruning

OPSETS = range(13, 18)  # ReduceMean still has its axes as an attribute
SMOOTHING = 0.8  # share of a channel's size that the weights take over; measured on MiniLM

_STEPS = 255  # uint8 activations

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class WeightOptions:
    """What becomes of weights. ``levels`` 63 are for CPUs whose sums of products of bytes saturate."""

    pruning: Pruning = field(default_factory=Pruning)
    levels: int = 127  # to either side of zero


@dataclass(frozen=True)
class _Layer:
    """``bias`` is the node that adds it, if one does; ``weight`` and ``shift`` are arrays."""

    product: NodeProto
    weight: Floats  # (in, out)
    bias: NodeProto | None
    shift: Floats  # (out,)

    @property
    def output(self) -> str:
        name: str = (self.bias or self.product).output[0]
        return name


def write_sparse_int8(
    source: Path,
    calibration: Sequence[Batch],
    path: Path,
    how: WeightOptions,
    *,
    threads: int = 1,
) -> int:
    """Write the sparse int8 form of the fp32 graph ``source`` to ``path``; return its quantized matrices.

    Ranges of values are taken from ``calibration``. Raises :class:`InputFileError` where that is empty,
    :class:`ModelRefusedError` for a graph that is too new, is not valid or has nothing to quantize.
    """
    model = onnx.load(source)
    layers = find_layers(model)
    names = sorted({layer.product.input[0] for layer in layers})
    ranges = channel_ranges(source, names, calibration, threads=threads)
    try:
        quantize(model, layers, ranges, how)
    except onnx.checker.ValidationError as error:
        raise ModelRefusedError(f"the graph cannot be quantized: {error}") from error
    onnx.save_model(model, path)
    return len(layers)


def find_layers(model: ModelProto) -> list[_Layer]:
    """Return the multiplications of (batch, sequence, in) by fp32 weights (in, out), in the graph's order.

    Raises :class:`ModelRefusedError` where there is none, and for an opset that DeepSparse does not read.
    """
    opset = next((entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"}), 0)
    if opset not in OPSETS:
        raise ModelRefusedError(
            f"the graph has opset {opset}: export it with {OPSETS.start} to {OPSETS.stop - 1}"
        )
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    ranks = _ranks(model)
    users: dict[str, list[NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    kept = {value.name for value in model.graph.output}
    layers = []
    for node in model.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights or ranks.get(node.input[0]) != 3:
            continue
        tensor = weights[node.input[1]]
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
            continue
        weight = numpy_helper.to_array(tensor)
        add, shift = None, np.zeros(weight.shape[1], np.float32)
        product = node.output[0]
        following = users.get(product, [])
        if len(following) == 1 and following[0].op_type == "Add" and product not in kept:
            constant = next((name for name in following[0].input if name in weights), None)
            if constant is not None and tuple(weights[constant].dims) == shift.shape:
                add, shift = following[0], numpy_helper.to_array(weights[constant])
        layers.append(_Layer(node, weight, add, shift))
    if not layers:
        raise ModelRefusedError("the graph has no multiplication of token states by fp32 weights")
    return layers


def _ranks(model: ModelProto) -> dict[str, int]:
    """Return the number of dimensions of every value that shape inference knows."""
    graph = shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {v.name: len(v.type.tensor_type.shape.dim) for v in values if v.type.tensor_type.HasField("shape")}


def quantize(
    model: ModelProto,
    layers: Sequence[_Layer],
    ranges: Mapping[str, ChannelRange],
    how: WeightOptions,
) -> None:
    """Rewrite ``layers`` of ``model`` in place; ``ranges`` has their inputs, by channel.

    There is no smoothing where a matrix has one scale: it makes rows of weights unequal.
    """
    by_input: dict[str, list[_Layer]] = {}
    for layer in layers:
        by_input.setdefault(layer.product.input[0], []).append(layer)
    by_product = {layer.product.output[0]: layer for layer in layers}
    gone = {layer.bias.output[0] for layer in layers if layer.bias is not None}
    opset = next(entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"})
    graph = _Int8Graph(opset, how)
    for node in model.graph.node:
        if node.output[0] in by_product:
            layer = by_product[node.output[0]]
            source = layer.product.input[0]
            graph.add_layer(layer, graph.quantized(source, ranges[source], by_input[source]))
        elif node.op_type == "LayerNormalization":
            graph.add_layer_norm(node)
        elif node.output[0] not in gone:
            graph.nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(graph.nodes)
    used = {name for node in graph.nodes for name in node.input}
    weights = [tensor for tensor in (*model.graph.initializer, *graph.initializers) if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(weights)
    del model.graph.value_info[:]
    model.ir_version = min(model.ir_version, IR_VERSION)
    onnx.checker.check_model(model)


@dataclass(frozen=True)
class _Quantized:
    """An activation as uint8: its name, scale, zero point (a name), and the factors its weights take over."""

    name: str
    scale: np.float32
    zero_point: str
    factors: Floats  # (in,)


class _Int8Graph(GraphBuilder):
    """Collects the new nodes."""

    def __init__(self, opset: int, how: WeightOptions) -> None:
        super().__init__(opset, constants="int8/constant")
        self._how = how
        self._quantized: dict[str, _Quantized] = {}

    def quantized(self, source: str, found: ChannelRange, layers: Sequence[_Layer]) -> _Quantized:
        """Return ``source`` as uint8; layers with the same input share it."""
        if source in self._quantized:
            return self._quantized[source]
        prefix = f"int8/{source}"
        factors = np.ones_like(found[0])
        rows = np.max([np.abs(layer.weight).max(axis=1) for layer in layers], axis=0)  # (in,)
        largest = np.maximum(np.abs(found[0]), np.abs(found[1]))
        used = (rows > 0) & (largest > 0)
        factors[used] = largest[used] ** SMOOTHING / rows[used] ** (1 - SMOOTHING)
        inverse = self.weight(1 / factors, f"{prefix}/inverse")
        smooth = self.op("Mul", [source, inverse], f"{prefix}/smooth")
        low = min(float((found[0] / factors).min()), 0.0)  # zero has to be one of the steps
        high = max(float((found[1] / factors).max()), 0.0)
        scale = np.float32(max(high - low, 1e-6) / _STEPS)
        zero_point = self.constant(round(-low / float(scale)), np.uint8)
        name = self.op("QuantizeLinear", [smooth, self.constant(scale), zero_point], f"{prefix}/uint8")
        self._quantized[source] = _Quantized(name, scale, zero_point, factors)
        return self._quantized[source]

    def add_layer(self, layer: _Layer, x: _Quantized) -> None:
        """(batch, sequence, in) as uint8 -> (batch, sequence, out) as float32, under the layer's own name."""
        weight = self._how.pruning.apply(layer.weight) * x.factors[:, None]
        largest = np.abs(weight).max(axis=0)  # (out,)
        # An output whose weights are all zero has only its bias: any scale does that keeps it in range.
        scale = np.asarray(np.where(largest > 0, largest, 1.0) / self._how.levels, np.float32)
        rescale = x.scale * scale
        levels = self._how.levels
        integers = np.clip(np.rint(weight / scale), -levels, levels).astype(np.int8)
        prefix = f"int8/{layer.output}"
        zero = self.constant(0, np.int8)
        inputs = [x.name, self.weight(integers, f"{prefix}/weight"), x.zero_point, zero]
        value = self.op("MatMulInteger", inputs, f"{prefix}/product")
        shift = np.rint(layer.shift / rescale).astype(np.int32)
        value = self.op("Add", [value, self.weight(shift, f"{prefix}/bias")], f"{prefix}/sum")
        value = self.op("Cast", [value], f"{prefix}/float", to=TensorProto.FLOAT)
        self.op("Mul", [value, self.weight(rescale, f"{prefix}/scale")], layer.output)

    def add_layer_norm(self, node: NodeProto) -> None:
        """Write LayerNormalization over the last dimension as its parts; leave others as they are."""
        settings = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
        if settings.get("axis", -1) != -1 or len(node.output) > 1 or len(node.input) != 3:
            self.nodes.append(node)
            return
        x, weight, bias = node.input
        name = node.output[0]
        mean = self.op("ReduceMean", [x], f"{name}/mean", axes=[-1])
        centred = self.op("Sub", [x, mean], f"{name}/centred")
        square = self.op("Pow", [centred, self.constant(2.0)], f"{name}/square")
        variance = self.op("ReduceMean", [square], f"{name}/variance", axes=[-1])
        above_zero = self.op(
            "Add", [variance, self.constant(settings.get("epsilon", 1e-5))], f"{name}/above_zero"
        )
        deviation = self.op("Sqrt", [above_zero], f"{name}/deviation")
        normal = self.op("Div", [centred, deviation], f"{name}/normal")
        scaled = self.op("Mul", [normal, weight], f"{name}/scaled")
        self.op("Add", [scaled, bias], name)
