"""Tasks: encoding, padding, pooling, labels, tensors; and the engine below them."""

import base64
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphs import write_lookup, write_mean, write_square
from gristmill import wire
from gristmill.errors import ErrorCode
from gristmill.wire import Result
from gristmill_worker.engines.base import Engine, EngineError, EngineOptions, engine_loader
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.importer import import_model
from gristmill_worker.models.manifest import Manifest, ModelRefusedError
from gristmill_worker.tasks.base import Encoded, ItemError, Task, make_task
from gristmill_worker.tasks.values import from_value

TEXTS = ["bread", "the miller grinds the corn", "water turns the wheel of the old mill"]
SHAPES = [(1, 16), (4, 16), (4, 48)]


def load(model: Path, **changes: Any) -> tuple[Manifest, Task, Engine]:
    manifest = manifests.load(model).model_copy(update=changes)
    task = make_task(model, manifest, truncate=True)
    return manifest, task, engine_loader("onnxruntime")(model, manifest, SHAPES, EngineOptions())


def encoded(task: Task, *bodies: Mapping[str, Any]) -> list[Encoded]:
    items = task.encode(bodies)
    good = [item for item in items if isinstance(item, Encoded)]
    assert len(good) == len(items), items
    return good


def score(task: Task, engine: Engine, items: list[Encoded], shape: tuple[int, int]) -> list[Any]:
    return task.decode(engine.run(task.assemble(items, shape)), items)


def as_json(value: Any) -> Any:
    return wire.decode_result(wire.encode_result(Result("a", "ok", value))).value


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_is_what_its_name_says(tiny_encoder: Path, pooling: str, normalize: bool) -> None:
    _, task, engine = load(tiny_encoder, pooling=pooling, normalize=normalize)
    items = encoded(task, *({"text": text} for text in TEXTS))
    batch = task.assemble(items, (4, 16))
    hidden = engine.run(batch)["last_hidden_state"]  # (4, 16, hidden)
    for row, item, value in zip(hidden, items, score(task, engine, items, (4, 16)), strict=False):
        words = row[: item.length].astype(np.float64)
        expected = {"mean": words.mean(0), "cls": words[0], "max": words.max(0)}[pooling]
        if normalize:
            expected = expected / np.linalg.norm(expected)
        assert np.allclose(value, expected, atol=1e-5)


def test_a_value_does_not_depend_on_padding_or_neighbours(tiny_encoder: Path) -> None:
    _, task, engine = load(tiny_encoder)
    items = encoded(task, *({"text": text} for text in TEXTS))
    together = score(task, engine, items, (4, 48))
    for item, value in zip(items, together, strict=True):
        (alone,) = score(task, engine, [item], (1, 16))
        assert np.allclose(alone, value, atol=1e-5)


def test_an_embedding_comes_as_floats_or_as_base64(tiny_encoder: Path) -> None:
    _, task, engine = load(tiny_encoder)
    items = encoded(task, {"text": TEXTS[1]}, {"text": TEXTS[1], "options": {"encoding": "base64"}})
    plain, packed = (as_json(value) for value in score(task, engine, items, (4, 16)))
    assert isinstance(plain, list)
    raw = np.frombuffer(base64.b64decode(packed["data"]), "<f4")
    assert packed["dtype"] == "float32"
    assert packed["shape"] == [len(plain)]
    assert np.array_equal(raw, np.array(plain, np.float32))


def test_softmax_top_k_and_pairs(tiny_classifier: Path) -> None:
    manifest, task, engine = load(tiny_classifier)
    items = encoded(
        task,
        {"text": TEXTS[1]},
        {"text": TEXTS[1], "options": {"top_k": 2}},
        {"text": TEXTS[1], "options": {"top_k": None}},
        {"text": TEXTS[1], "pair": TEXTS[2]},
    )
    best, two, everything, pair = score(task, engine, items, (4, 48))
    assert everything[:2] == two
    assert two[:1] == best
    assert {entry["label"] for entry in everything} == set(manifest.labels or ())
    assert sum(entry["score"] for entry in everything) == pytest.approx(1.0, abs=1e-5)
    assert [entry["score"] for entry in everything] == sorted((e["score"] for e in everything), reverse=True)
    assert pair != best
    logits = engine.run(task.assemble(items, (4, 48)))["logits"][0].astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum()
    assert best[0]["score"] == pytest.approx(expected.max(), abs=1e-5)


def test_sigmoid_scores_each_label_by_itself(tiny_classifier: Path) -> None:
    _, task, engine = load(tiny_classifier, activation="sigmoid")
    (item,) = encoded(task, {"text": TEXTS[1], "options": {"top_k": None}})
    (value,) = score(task, engine, [item], (1, 16))
    logits = engine.run(task.assemble([item], (1, 16)))["logits"][0].astype(np.float64)
    assert [entry["score"] for entry in value] == pytest.approx(
        sorted(1 / (1 + np.exp(-logits)))[::-1], abs=1e-5
    )


def test_a_pair_has_both_texts_and_their_segments(tiny_classifier: Path) -> None:
    _, task, _ = load(tiny_classifier)
    single, pair = encoded(task, {"text": TEXTS[0]}, {"text": TEXTS[0], "pair": TEXTS[2]})
    batch = task.assemble([single, pair], (4, 16))
    assert batch["token_type_ids"][0].sum() == 0
    assert batch["token_type_ids"][1].sum() == pair.length - single.length
    assert batch["attention_mask"].sum(axis=1).tolist()[:2] == [single.length, pair.length]
    assert np.array_equal(batch["input_ids"][2], batch["input_ids"][0])  # spare rows are sensible ones


def test_truncation_keeps_the_special_tokens(tiny_classifier: Path) -> None:
    manifest, task, _ = load(tiny_classifier)
    long, short = encoded(task, {"text": "mill " * 500}, {"text": "mill"})
    assert (long.length, long.truncated) == (manifest.max_length, True)
    assert not short.truncated
    ids = task.assemble([short, long], (4, 48))["input_ids"]
    assert ids[1, -1] == ids[0, short.length - 1]  # [SEP]


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookup")
    import_model(str(write_lookup(folder / "source")), folder / "model")
    return folder / "model"


def test_tensors_go_in_and_come_out_without_their_padding(lookup: Path) -> None:
    _, task, engine = load(lookup)
    raw = base64.b64encode(np.array([3], "<i8").tobytes()).decode()
    items = encoded(
        task,
        {"tensors": {"ids": [0, 1, 2]}},
        {
            "tensors": {"ids": {"dtype": "int64", "shape": [1], "data": raw}},
            "options": {"encoding": "base64"},
        },
    )
    assert [item.length for item in items] == [3, 1]
    plain, packed = (as_json(value) for value in score(task, engine, items, (4, 16)))
    assert plain == {"rows": [[0, 1], [2, 3], [4, 5]]}
    assert packed["rows"]["shape"] == [1, 2]
    assert np.frombuffer(base64.b64decode(packed["rows"]["data"]), "<f4").tolist() == [6, 7]


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        (None, ErrorCode.BAD_REQUEST),
        ([], ErrorCode.BAD_REQUEST),
        ({}, ErrorCode.BAD_REQUEST),
        ({"ids": [1], "more": [1]}, ErrorCode.BAD_REQUEST),
        ({"ids": "abc"}, ErrorCode.BAD_REQUEST),
        ({"ids": ["abc"]}, ErrorCode.BAD_REQUEST),
        ({"ids": [[1]]}, ErrorCode.BAD_REQUEST),
        ({"ids": 1}, ErrorCode.BAD_REQUEST),
        ({"ids": [1, [2]]}, ErrorCode.BAD_REQUEST),
        ({"ids": [1.5]}, ErrorCode.BAD_REQUEST),
        ({"ids": [None]}, ErrorCode.BAD_REQUEST),
        ({"ids": [10**30]}, ErrorCode.BAD_REQUEST),
        ({"ids": [2**63]}, ErrorCode.BAD_REQUEST),
        ({"ids": [*["a"] * 1000, "x" * 500_000]}, ErrorCode.BAD_REQUEST),
        ({"ids": {"dtype": "complex64", "shape": [1], "data": ""}}, ErrorCode.BAD_REQUEST),
        ({"ids": {"dtype": "object", "shape": [1], "data": ""}}, ErrorCode.BAD_REQUEST),
        ({"ids": {"dtype": [], "shape": [1], "data": ""}}, ErrorCode.BAD_REQUEST),
        ({"ids": {"dtype": "int64", "shape": [2], "data": "AAAA"}}, ErrorCode.BAD_REQUEST),
        ({"ids": {"dtype": "int64", "shape": [1], "data": "*"}}, ErrorCode.BAD_REQUEST),
        ({"ids": {"dtype": "int64", "shape": [-1], "data": ""}}, ErrorCode.BAD_REQUEST),
        ({"ids": {"dtype": "float32", "shape": [1], "data": "AAAAAA=="}}, ErrorCode.BAD_REQUEST),
        ({"ids": []}, ErrorCode.EMPTY_INPUT),
        ({"ids": [1] * 100_000}, ErrorCode.TOO_LONG),
    ],
)
def test_bad_tensors_are_one_requests_error(lookup: Path, tensors: Any, code: ErrorCode) -> None:
    _, task, _ = load(lookup)
    bad, good = task.encode([{"tensors": tensors}, {"tensors": {"ids": [1]}}])
    assert isinstance(bad, ItemError)
    assert bad.code == code
    assert isinstance(good, Encoded)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        ([1, 255], "uint8", [1, 255]),
        ([-128], "int8", [-128]),
        ([True, False], "bool", [True, False]),
        ([1, 2.5], "float32", [1.0, 2.5]),
        ([2**40], "int64", [2**40]),
        (7, "int32", 7),
        ([300], "int8", None),
        ([-1], "uint8", None),
        ([2**40], "int32", None),
        ([2.5], "int64", None),
        ([2], "bool", None),
        ([1e300], "float32", None),
    ],
)
def test_a_tensor_keeps_its_values_or_is_refused(value: Any, dtype: str, expected: Any) -> None:
    if expected is None:
        with pytest.raises(ItemError, match="cannot hold"):
            from_value(value, "x", dtype)
    else:
        array = from_value(value, "x", dtype)
        assert array.dtype == dtype
        assert array.tolist() == expected


def test_a_model_of_one_number_an_item(tmp_path: Path) -> None:
    import_model(str(write_square(tmp_path / "source")), tmp_path / "model")
    manifest = manifests.load(tmp_path / "model")
    task = make_task(tmp_path / "model", manifest, truncate=True)
    engine = engine_loader("onnxruntime")(tmp_path / "model", manifest, [(4, 1)], EngineOptions())
    items = encoded(
        task, {"tensors": {"value": 3}}, {"tensors": {"value": 0.5}, "options": {"encoding": "base64"}}
    )
    plain, packed = (as_json(value) for value in score(task, engine, items, (4, 1)))
    assert plain == {"square": 9.0}
    assert packed["square"]["shape"] == []


def test_a_graph_that_reads_its_padding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="changes when padding follows"):
        import_model(str(write_mean(tmp_path / "source")), tmp_path / "model")


def test_an_engines_own_error_is_ours(lookup: Path) -> None:
    _, task, engine = load(lookup)
    items = encoded(task, {"tensors": {"ids": [1000]}})
    with pytest.raises(EngineError, match="onnxruntime failed"):
        score(task, engine, items, (1, 16))


def test_a_changed_manifest_is_refused(tiny_classifier: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_classifier, model)
    path = model / "gristmill.json"
    path.write_text(path.read_text("utf-8").replace('"flour"', '"grist"'), "utf-8")
    with pytest.raises(ModelRefusedError, match=r"gristmill\.json was changed"):
        manifests.load(model)


def test_a_graph_that_is_none_is_refused(tiny_encoder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_encoder, model)
    manifest = manifests.load(model)
    (model / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(ModelRefusedError, match="was changed"):
        manifests.load(model)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelRefusedError, match="cannot be read"):
        make_task(model, manifest, truncate=True)
