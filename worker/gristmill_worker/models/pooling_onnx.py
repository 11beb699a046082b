"""Pooling, normalisation and a linear head as the end of an encoder's graph."""

from __future__ import annotations

from onnx import ModelProto, TensorProto, helper

from gristmill_worker.models.graph_builder import GraphBuilder, Linear
from gristmill_worker.models.manifest import Manifest, ModelRefusedError

_OLDEST_OPSET = 13  # the axes of Unsqueeze and ReduceSum are inputs since then
_REDUCE_MAX_TAKES_AXES = 18  # and those of ReduceMax since then
_MASK = "attention_mask"
_LEAST = -3.0e38


def append_head(model: ModelProto, manifest: Manifest, head: Linear) -> None:
    """End an encoder's graph with the embedding that ``manifest`` describes and a linear layer, in place.

    ``head.weight`` is (labels, hidden). The graph's only output becomes ``logits`` (batch, labels). Raises
    :class:`ModelRefusedError` for a graph of an old opset, or without the mask that pooling needs.
    """
    opset = next((entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"}), 0)
    if opset < _OLDEST_OPSET:
        raise ModelRefusedError(
            f"the encoder's graph has opset {opset}: export it with {_OLDEST_OPSET} or newer"
        )
    graph = GraphBuilder(opset, constants="head/constant")
    states = manifest.outputs[0]
    x = states.name
    if states.dtype != "float32":
        x = graph.op("Cast", [x], "head/states", to=TensorProto.FLOAT)
    if len(states.shape) == 3:
        if manifest.pooling != "cls" and _MASK not in {tensor.name for tensor in manifest.inputs}:
            raise ModelRefusedError(f"the encoder has no input {_MASK!r}: padding would be pooled like text")
        x = _pool(graph, x, str(manifest.pooling))
    if manifest.normalize:
        x = _normalize(graph, x)
    graph.linear(x, head, "logits")
    model.graph.node.extend(graph.nodes)
    model.graph.initializer.extend(graph.initializers)
    del model.graph.output[:]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", head.bias.size])
    model.graph.output.append(logits)


def _pool(graph: GraphBuilder, states: str, pooling: str) -> str:
    """(batch, sequence, hidden) -> (batch, hidden), over real tokens only."""
    if pooling == "cls":
        return graph.first_token(states, "head/pooled")
    mask = graph.op("Unsqueeze", [_MASK, graph.ints(2)], "head/mask")  # (batch, sequence, 1)
    if pooling == "max":
        real = graph.op("Cast", [mask], "head/real", to=TensorProto.BOOL)
        masked = graph.op("Where", [real, states, graph.constant(_LEAST)], "head/masked")
        if graph.opset >= _REDUCE_MAX_TAKES_AXES:
            return graph.op("ReduceMax", [masked, graph.ints(1)], "head/pooled", keepdims=0)
        return graph.op("ReduceMax", [masked], "head/pooled", axes=[1], keepdims=0)
    weights = graph.op("Cast", [mask], "head/weights", to=TensorProto.FLOAT)
    weighted = graph.op("Mul", [states, weights], "head/weighted")
    total = graph.op("ReduceSum", [weighted, graph.ints(1)], "head/sum", keepdims=0)  # (batch, hidden)
    count = graph.op("ReduceSum", [weights, graph.ints(1)], "head/count", keepdims=0)  # (batch, 1)
    at_least_one = graph.op("Max", [count, graph.constant(1.0)], "head/at_least_one")
    return graph.op("Div", [total, at_least_one], "head/pooled")


def _normalize(graph: GraphBuilder, x: str) -> str:
    """Scale each row of (batch, hidden) to length 1."""
    square = graph.op("Mul", [x, x], "head/square")
    total = graph.op("ReduceSum", [square, graph.ints(1)], "head/square_sum", keepdims=1)
    norm = graph.op("Sqrt", [total], "head/norm")
    above_zero = graph.op("Max", [norm, graph.constant(1e-12)], "head/above_zero")
    return graph.op("Div", [x, above_zero], "head/normalized")
