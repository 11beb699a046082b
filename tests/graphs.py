"""A small ONNX graph that fails on demand, for tests of what surrounds a model."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROWS = 8
NAN_ROW = 7  # answers NaN
# An index past the last row makes the engine raise.


def write_lookup(directory: Path) -> Path:
    """Write ``model.onnx``: ids (batch, sequence) -> rows (batch, sequence, 2) of a table."""
    directory.mkdir(parents=True, exist_ok=True)
    table = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
    table[NAN_ROW] = np.nan
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["rows"], axis=0)],
        "lookup",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["batch", "sequence", 2])],
        [numpy_helper.from_array(table, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, directory / "model.onnx")
    return directory
