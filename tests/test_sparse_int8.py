"""The static int8 form and pruning: how near to fp32, what is left as it is, what is refused."""

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from gristmill.errors import InputFileError
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.calibration import Batch, activation_ranges, channel_ranges
from gristmill_worker.models.inspect_onnx import sparsity
from gristmill_worker.models.manifest import MODEL_FILE, ModelRefusedError
from gristmill_worker.models.pruning import Pruning
from gristmill_worker.models.sparse_int8 import WeightOptions, write_sparse_int8
from gristmill_worker.tasks.base import Encoded, make_task

TEXTS = [" ".join(text.split())[:500] for _, text in sorted(topics.items())[:40]]
WEIGHTS = WeightOptions()
WORDS = ["the miller grinds the corn", "water turns the wheel", "bread", "a horse and a cart on the road"]


def encoded(model: Path, texts: list[str]) -> list[Batch]:
    """Each text as a batch of its own, without padding."""
    task = make_task(model, manifests.load(model), truncate=True)
    items = task.encode([{"text": text} for text in texts])
    return [task.assemble([item], (1, item.length)) for item in items if isinstance(item, Encoded)]


def cosines(model: Path, other: Path, batches: list[Batch]) -> list[float]:
    """Cosine of two graphs' first output for each text, averaged over its tokens."""
    found = []
    for batch in batches:
        values = (run(path, dict(batch)) for path in (model / MODEL_FILE, other))
        a, b = (value.reshape(-1, value.shape[-1]).mean(axis=0, dtype=np.float64) for value in values)
        found.append(float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))))
    return found


def write(model: Path, texts: list[str], path: Path, how: WeightOptions = WEIGHTS) -> int:
    return write_sparse_int8(model / MODEL_FILE, encoded(model, texts), path, how)


def run(path: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0])


def test_int8_stays_near_to_fp32(minilm: Path, tmp_path: Path) -> None:
    assert write(minilm, TEXTS[::2], tmp_path / "int8.onnx") == 36
    found = cosines(minilm, tmp_path / "int8.onnx", encoded(minilm, TEXTS[1::2]))
    assert np.mean(found) > 0.997
    assert min(found) > 0.99
    graph = onnx.load(tmp_path / "int8.onnx").graph
    kinds = [node.op_type for node in graph.node]
    assert (kinds.count("MatMulInteger"), kinds.count("MatMul"), kinds.count("LayerNormalization")) == (
        36,
        12,
        0,
    )
    assert kinds.count("QuantizeLinear") == 24  # query, key and value share one


def test_a_text_is_answered_the_same_beside_others_and_with_padding(minilm: Path, tmp_path: Path) -> None:
    write(minilm, TEXTS, tmp_path / "int8.onnx")
    batches = encoded(minilm, TEXTS[:4])
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    padded = {
        name: np.concatenate([np.pad(b[name], ((0, 0), (0, longest - b[name].shape[1]))) for b in batches])
        for name in batches[0]
    }
    together = run(tmp_path / "int8.onnx", padded)
    for row, batch in enumerate(batches):
        alone = run(tmp_path / "int8.onnx", dict(batch))[0]
        # A value on the edge of two steps may fall to either side.
        np.testing.assert_allclose(together[row, : len(alone)].mean(0), alone.mean(0), atol=0.02)


@pytest.mark.parametrize("block", [1, 4])
def test_pruning_removes_the_smallest_blocks(tiny_encoder: Path, tmp_path: Path, block: int) -> None:
    write(tiny_encoder, WORDS, tmp_path / "x.onnx", WeightOptions(Pruning(0.75, block)))
    assert sparsity(onnx.load(tmp_path / "x.onnx")) == pytest.approx(0.75, abs=0.02)
    weight = np.random.default_rng(3).normal(size=(8, 6)).astype(np.float32)
    pruned = Pruning(0.5, block).apply(weight)
    sizes = np.abs(weight).reshape(8 // block, block, 6).sum(axis=1)
    gone = ~pruned.reshape(8 // block, block, 6).any(axis=1)
    assert gone.sum() == gone.size // 2
    assert sizes[gone].max() < sizes[~gone].min()
    assert (pruned[pruned != 0] == weight[pruned != 0]).all()


def test_a_matrix_that_is_not_pruned_may_have_any_number_of_inputs() -> None:
    weight = np.ones((6, 3), np.float32)
    assert Pruning().apply(weight) is weight


@pytest.mark.parametrize("levels", [63, 127])
def test_weights_use_the_levels_that_were_asked_for(tiny_encoder: Path, tmp_path: Path, levels: int) -> None:
    path = tmp_path / "x.onnx"
    write(tiny_encoder, WORDS, path, WeightOptions(levels=levels))
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    weights = [array for array in arrays.values() if array.dtype == np.int8 and array.ndim == 2]
    assert len(weights) == 12
    assert {int(np.abs(array.astype(int)).max()) for array in weights} == {levels}


def test_outputs_that_lost_every_weight_keep_their_bias(tiny_encoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    write(tiny_encoder, WORDS, path, WeightOptions(Pruning(1.0)))
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    before = onnx.load(tiny_encoder / MODEL_FILE).graph.initializer
    biases = {tensor.name: numpy_helper.to_array(tensor) for tensor in before}
    name = "layer.0/inner"
    restored = arrays[f"int8/{name}/bias"] * arrays[f"int8/{name}/scale"]
    np.testing.assert_allclose(restored, biases[f"{name}.bias"], atol=1e-3)


def test_a_head_stays_in_fp32(tiny_classifier: Path, tmp_path: Path) -> None:
    assert write(tiny_classifier, WORDS, tmp_path / "x.onnx") == 12
    assert min(cosines(tiny_classifier, tmp_path / "x.onnx", encoded(tiny_classifier, WORDS))) > 0.99
    nodes = {node.output[0]: node.op_type for node in onnx.load(tmp_path / "x.onnx").graph.node}
    assert nodes["logits/product"] == nodes["head/dense/product"] == "MatMul"


def test_ranges_are_those_of_the_values(tiny_encoder: Path) -> None:
    batches = encoded(tiny_encoder, WORDS)
    values = np.concatenate([run(tiny_encoder / MODEL_FILE, dict(b))[0] for b in batches])
    names = ["last_hidden_state", "layer.0"]
    low, high = channel_ranges(tiny_encoder / MODEL_FILE, names, batches)["last_hidden_state"]
    np.testing.assert_allclose(low, values.min(axis=0), atol=1e-6)
    np.testing.assert_allclose(high, values.max(axis=0), atol=1e-6)
    ranges = activation_ranges(tiny_encoder / MODEL_FILE, names, batches)
    assert ranges["last_hidden_state"] == pytest.approx((values.min(), values.max()), abs=1e-6)
    assert set(ranges) == set(names)


def test_what_cannot_be_quantized_is_refused(tiny_encoder: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.onnx"
    with pytest.raises(InputFileError, match="no text to calibrate with"):
        write(tiny_encoder, [], out)
    with pytest.raises(ModelRefusedError, match="blocks of 5"):
        write(tiny_encoder, WORDS, out, WeightOptions(Pruning(0.5, 5)))
    with pytest.raises(ModelRefusedError, match="cannot be calibrated"):
        activation_ranges(tiny_encoder / MODEL_FILE, ["no such value"], [])
    with pytest.raises(InputFileError, match="no text"):
        activation_ranges(tiny_encoder / MODEL_FILE, ["layer.0"], [])
    model = onnx.load(tiny_encoder / MODEL_FILE)
    onnx.helper.set_model_props(model, {"ground": "fine"})
    model.metadata_props.append(model.metadata_props[0])  # the engines do not mind
    onnx.save(model, tmp_path / MODEL_FILE)
    with pytest.raises(ModelRefusedError, match="cannot be quantized"):
        write_sparse_int8(tmp_path / MODEL_FILE, encoded(tiny_encoder, WORDS), out, WEIGHTS)
    model.opset_import[0].version = 18
    onnx.save(model, tmp_path / MODEL_FILE)
    with pytest.raises(ModelRefusedError, match="opset 18: export it with 13 to 17"):
        write_sparse_int8(tmp_path / MODEL_FILE, encoded(tiny_encoder, WORDS), out, WEIGHTS)
    assert not out.exists()
