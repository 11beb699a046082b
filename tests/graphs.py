"""A small ONNX graph that fails on demand, for tests of what surrounds a model."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROWS = 8
NAN_ROW = 7  # answers NaN
# An index past the last row makes the engine raise.


def write_lookup(directory: Path, width: int = 2) -> Path:
    """Write ``model.onnx``: ids (batch, sequence) -> rows (batch, sequence, width) of a table."""
    table = np.arange(width * ROWS, dtype=np.float32).reshape(ROWS, width)
    table[NAN_ROW] = np.nan
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["rows"], axis=0)],
        "lookup",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["batch", "sequence", width])],
        [numpy_helper.from_array(table, "table")],
    )
    return _save(graph, directory)


def write_mean(directory: Path) -> Path:
    """Write a graph that averages over its padding too: values (batch, sequence) -> mean (batch,)."""
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["values"], ["mean"], axes=[1], keepdims=0)],
        "mean",
        [helper.make_tensor_value_info("values", TensorProto.FLOAT, ["batch", "sequence"])],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["batch"])],
    )
    return _save(graph, directory)


def write_square(directory: Path) -> Path:
    """Write a graph on one number an item: value (batch,) -> square (batch,)."""
    graph = helper.make_graph(
        [helper.make_node("Mul", ["value", "value"], ["square"])],
        "square",
        [helper.make_tensor_value_info("value", TensorProto.FLOAT, ["batch"])],
        [helper.make_tensor_value_info("square", TensorProto.FLOAT, ["batch"])],
    )
    return _save(graph, directory)


def _save(graph: onnx.GraphProto, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, directory / "model.onnx")
    return directory
