"""Building ONNX graphs from numpy weights: a thin layer over ``onnx.helper`` that knows the usual layers.

Operators follow opset 17: it has LayerNormalization, every runtime in use reads it, and the patterns here
(erf gelu, masked softmax attention) are the ones that runtimes fuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8  # the one that came with opset 17
EXTERNAL_DATA_FILE = "model.onnx.data"

# Added to the scores of masked positions. exp(-10000) is 0 in every format, and unlike the least float32 it
# stays finite in bfloat16 and float16: a row that is padding only then attends evenly instead of giving NaN.
_MASKED = -10_000.0
_PROTOBUF_LIMIT = 2**31 - 2**24  # bytes of weights; one protobuf message cannot hold more than 2 GiB


@dataclass(frozen=True)
class Linear:
    """A fully connected layer; ``weight`` is (out, in) as checkpoints store it."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


@dataclass(frozen=True)
class Norm:
    """A LayerNorm over the last dimension."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    epsilon: float


class GraphBuilder:
    """Collects nodes and weights. Methods take and return names of values; ``name`` is for what they add."""

    def __init__(self, opset: int = OPSET, constants: str = "constant") -> None:
        """``constants`` is what constants are called: unlike those of a graph that this one is added to."""
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._constant_name = constants

    def op(self, kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Add one node with one output, which is called like the node."""
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def weight(self, array: NDArray[Any], name: str) -> str:
        """Add an array as an initializer."""
        self.initializers.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def constant(self, value: Any, dtype: type[np.generic] = np.float32) -> str:
        """Return a small constant; equal ones are stored once."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.weight(array, f"{self._constant_name}_{len(self._constants)}")
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """Return a one-dimensional int64 constant, as axes and shapes are given."""
        return self.constant(values, np.int64)

    def linear(self, x: str, layer: Linear, name: str) -> str:
        """x @ weight.T + bias."""
        weight = self.weight(layer.weight.T, f"{name}.weight")
        product = self.op("MatMul", [x, weight], f"{name}/product")
        return self.op("Add", [product, self.weight(layer.bias, f"{name}.bias")], name)

    def layer_norm(self, x: str, norm: Norm, name: str) -> str:
        weight = self.weight(norm.weight, f"{name}.weight")
        bias = self.weight(norm.bias, f"{name}.bias")
        return self.op("LayerNormalization", [x, weight, bias], name, axis=-1, epsilon=norm.epsilon)

    def gelu(self, x: str, name: str) -> str:
        """The exact form, 0.5 x (1 + erf(x / sqrt 2)) (Hendrycks and Gimpel, 2016)."""
        scaled = self.op("Div", [x, self.constant(sqrt(2.0))], f"{name}/scaled")
        erf = self.op("Erf", [scaled], f"{name}/erf")
        one_plus = self.op("Add", [erf, self.constant(1.0)], f"{name}/one_plus_erf")
        product = self.op("Mul", [x, one_plus], f"{name}/product")
        return self.op("Mul", [product, self.constant(0.5)], name)

    def gelu_tanh(self, x: str, name: str) -> str:
        """The approximation 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), from the same paper."""
        cube = self.op("Pow", [x, self.constant(3.0)], f"{name}/cube")
        small = self.op("Mul", [cube, self.constant(0.044715)], f"{name}/small")
        inner = self.op("Add", [x, small], f"{name}/inner")
        scaled = self.op("Mul", [inner, self.constant(sqrt(2.0 / pi))], f"{name}/scaled")
        tanh = self.op("Tanh", [scaled], f"{name}/tanh")
        one_plus = self.op("Add", [tanh, self.constant(1.0)], f"{name}/one_plus_tanh")
        product = self.op("Mul", [x, one_plus], f"{name}/product")
        return self.op("Mul", [product, self.constant(0.5)], name)

    def relu(self, x: str, name: str) -> str:
        return self.op("Relu", [x], name)

    def tanh(self, x: str, name: str) -> str:
        return self.op("Tanh", [x], name)

    def first_token(self, x: str, name: str) -> str:
        """(batch, sequence, hidden) -> (batch, hidden), at the first position."""
        return self.op("Gather", [x, self.constant(0, np.int64)], name, axis=1)

    def mask_bias(self, attention_mask: str, name: str = "mask_bias") -> str:
        """Turn a mask of ones and zeros (batch, sequence) into an additive bias (batch, 1, 1, sequence)."""
        wide = self.op("Unsqueeze", [attention_mask, self.ints(1)], f"{name}/heads")
        wide = self.op("Unsqueeze", [wide, self.ints(2)], f"{name}/queries")
        ones = self.op("Cast", [wide], f"{name}/float", to=TensorProto.FLOAT)
        masked = self.op("Sub", [self.constant(1.0), ones], f"{name}/masked")
        return self.op("Mul", [masked, self.constant(_MASKED)], name)

    def attention(self, x: str, qkv: Sequence[Linear], heads: int, mask_bias: str, name: str) -> str:
        """Multi-head scaled dot-product self-attention, before its output layer (Vaswani et al., 2017)."""
        hidden = qkv[0].bias.size
        query, key, value = (
            self.op(
                "Reshape",
                [self.linear(x, layer, f"{name}/{part}"), self.ints(0, 0, heads, hidden // heads)],
                f"{name}/{part}/heads",
            )
            for part, layer in zip(("query", "key", "value"), qkv, strict=True)
        )
        query = self.op("Transpose", [query], f"{name}/q", perm=[0, 2, 1, 3])
        key = self.op("Transpose", [key], f"{name}/k", perm=[0, 2, 3, 1])
        value = self.op("Transpose", [value], f"{name}/v", perm=[0, 2, 1, 3])
        scores = self.op("MatMul", [query, key], f"{name}/scores")
        scaled = self.op("Div", [scores, self.constant(sqrt(hidden // heads))], f"{name}/scaled")
        biased = self.op("Add", [scaled, mask_bias], f"{name}/biased")
        probabilities = self.op("Softmax", [biased], f"{name}/probabilities", axis=-1)
        context = self.op("MatMul", [probabilities, value], f"{name}/context")
        rows = self.op("Transpose", [context], f"{name}/rows", perm=[0, 2, 1, 3])
        return self.op("Reshape", [rows, self.ints(0, 0, hidden)], name)

    def model(
        self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto], name: str
    ) -> ModelProto:
        """Return the finished model."""
        graph = helper.make_graph(self.nodes, name, list(inputs), list(outputs), self.initializers)
        opset = helper.make_opsetid("", self.opset)
        return helper.make_model(
            graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="gristmill"
        )


def save_model(model: ModelProto, path: Path) -> list[str]:
    """Write ``model``; return the names of the files made: more than one where 2 GiB are not enough."""
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < _PROTOBUF_LIMIT:
        onnx.save_model(model, path)
        return [path.name]
    onnx.save_model(model, path, save_as_external_data=True, location=EXTERNAL_DATA_FILE, size_threshold=1024)
    return [path.name, EXTERNAL_DATA_FILE]
