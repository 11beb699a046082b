"""Fitting a head: what it learns, that the graph says the same, and what is refused."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from checkpoints import write_checkpoint
from gristmill.errors import InputFileError
from gristmill_worker.models import fit_head as fitting
from gristmill_worker.models import manifest
from gristmill_worker.models.batch_run import run_texts
from gristmill_worker.models.cli import model as model_commands
from gristmill_worker.models.fit_head import fit_head
from gristmill_worker.models.graph_builder import GraphBuilder, Linear
from gristmill_worker.models.importer import import_model
from gristmill_worker.models.labelled import Labelled, read_labelled
from gristmill_worker.models.manifest import Manifest, ModelRefusedError
from gristmill_worker.models.pooling_onnx import append_head
from gristmill_worker.tasks import text_classification

ROWS: dict[str, Sequence[str]] = {
    "billing": (
        "I was charged twice for the same order.",
        "Where can I download last month's invoice?",
        "Please refund the amount that you took by mistake.",
        "My credit card was declined at checkout.",
        "Why is there tax on my bill?",
        "The receipt shows a wrong total.",
        "Can I pay by bank transfer instead?",
        "How much does the yearly plan cost?",
        "You keep taking money although I cancelled.",
        "I need a copy of the invoice for my accountant.",
        "The discount code did not lower the price.",
        "When will the refund reach my account?",
    ),
    "delivery": (
        "My parcel has not arrived yet.",
        "The courier left the box at the wrong house.",
        "Can you ship this to Norway?",
        "The tracking number does not work.",
        "How long does shipping take?",
        "The package came damaged and open.",
        "I would like to change the delivery address.",
        "Nobody was at home when the driver came.",
        "Is express delivery possible for tomorrow?",
        "Half of the items are missing from the box.",
        "The shipment is stuck at customs.",
        "When will my order be dispatched?",
    ),
    "login": (
        "I forgot my password.",
        "The site says that my account is locked.",
        "The code for two-factor sign-in never comes.",
        "I cannot log in with my email address.",
        "How do I change my user name?",
        "The password reset link has expired.",
        "Someone else signed in to my account.",
        "The login page keeps sending me back.",
        "Please delete my account and profile.",
        "My session ends every few minutes and I have to sign in again.",
        "I want to sign in with a passkey.",
        "The account confirmation mail did not arrive.",
    ),
    "cooking": (
        "Whisk the eggs with the sugar until pale.",
        "Simmer the soup for twenty minutes.",
        "How long should I roast a chicken?",
        "Add a pinch of salt and some pepper.",
        "Knead the dough and let it rise.",
        "Which flour is best for bread?",
        "Fry the onions in butter until golden.",
        "My sauce is too thick, what can I add?",
        "Bake the cake at a medium heat.",
        "Chop the garlic and the parsley finely.",
        "Can I replace cream with yoghurt in this recipe?",
        "Marinate the meat overnight.",
    ),
    "weather": (
        "It will rain all afternoon.",
        "Heavy snow is expected in the hills.",
        "How warm will it be on Sunday?",
        "A storm is coming from the west.",
        "The fog will lift before noon.",
        "Strong winds and high waves along the coast.",
        "Is there any chance of frost tonight?",
        "Sunny spells with a few clouds.",
        "The heatwave ends with thunder.",
        "Temperatures fall below zero at night.",
        "Will I need an umbrella tomorrow?",
        "Hail damaged the roofs last night.",
    ),
}


def labelled(rows: dict[str, Sequence[str]], source: str = "rows.csv") -> Labelled:
    pairs = [(text, label) for label, texts in rows.items() for text in texts]
    texts, labels = zip(*pairs, strict=True)
    return Labelled(source, texts, labels, 0)


ALL = labelled(ROWS)
# Texts for encoders with random weights: what matters there is that the graph and scikit-learn agree.
WORDY = labelled(
    {
        "mill": ("the mill grinds corn", "the wheel turns", "stone and flour", "the miller sells bread"),
        "road": ("the horse waits", "a cart on the old road", "the road is cold at night", "horse and cart"),
        "sky": (
            "rain and wind",
            "the sun rises in the morning; it is warm",
            "night falls",
            "the wind never stops",
        ),
    }
)
TWO = labelled(
    {"no": ("rain", "cold wind", "bad road"), "yes": ("sun", "warm bread and new flour", "good corn")}
)


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def classify(directory: Path, texts: Sequence[str]) -> list[str]:
    described = manifest.load(directory)
    task = text_classification.make(directory, described, truncate=True)
    bodies = [{"text": text} for text in texts]
    return [
        value[0]["label"] for value in run_texts(directory, described, task, bodies, task.decode, threads=1)
    ]


@pytest.fixture(scope="module")
def fitted(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, fitting.Report]:
    out = tmp_path_factory.mktemp("head") / "desk"
    described, report = fit_head(minilm, ALL, out, holdout=0.25, threads=1)
    return out, described, report


# A head on MiniLM


def test_a_head_on_minilm_is_right_about_most_held_out_rows(
    fitted: tuple[Path, Manifest, fitting.Report],
) -> None:
    _, _, report = fitted
    assert report.evaluation.held_out_rows == 15
    assert report.fitted_rows == 45
    assert report.evaluation.accuracy > 0.9
    assert report.evaluation.macro_f1 > 0.9


def test_the_new_model_is_a_classifier_of_its_own(
    fitted: tuple[Path, Manifest, fitting.Report], minilm: Path
) -> None:
    out, described, _ = fitted
    encoder = manifest.load(minilm)
    assert manifest.load(out) == described
    assert described.name == "desk"
    assert described.task == "text-classification"
    assert described.labels == tuple(sorted(ROWS))
    assert described.activation == "softmax"
    assert described.source == f"fit-head on {encoder.id} with 60 rows of rows.csv"
    assert described.licence == encoder.licence
    assert (described.max_length, described.inputs) == (encoder.max_length, encoder.inputs)
    assert sorted(path.name for path in out.iterdir()) == sorted([*described.files, "gristmill.json"])
    assert json.loads((out / "config.json").read_text())["id2label"]["0"] == "billing"


def test_the_new_model_classifies_texts_it_never_saw(
    fitted: tuple[Path, Manifest, fitting.Report],
) -> None:
    texts = ["Is it going to be cloudy at the weekend?", "The postman lost my parcel.", "Reset my password!"]
    assert classify(fitted[0], texts) == ["weather", "delivery", "login"]


def test_equal_rows_give_an_equal_model(
    fitted: tuple[Path, Manifest, fitting.Report], minilm: Path, tmp_path: Path
) -> None:
    again, _ = fit_head(minilm, ALL, tmp_path / "desk", holdout=0.25, threads=1)
    assert again.files == fitted[1].files


# The graph and scikit-learn agree


def encoder_with(directory: Path, pooling: str, *, normalize: bool) -> Path:
    """Import a random encoder that pools as given."""
    source = write_checkpoint(directory / "source")
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [{"type": f"models.{kind}", "path": "pool" if kind == "Pooling" else ""} for kind in kinds]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "pool").mkdir()
    (source / "pool/config.json").write_text(json.dumps({"pooling_mode": pooling}))
    described = import_model(str(source), directory / "encoder")
    assert (described.pooling, described.normalize) == (pooling, normalize)
    return directory / "encoder"


def check_agreement(encoder: Path, rows: Labelled, out: Path) -> None:
    """Fit; fit_head itself compares every probability with scikit-learn's. Then look from outside."""
    described, report = fit_head(encoder, rows, out, test=rows)
    assert report.fitted_rows == report.evaluation.held_out_rows == len(rows.texts)
    right = [found == label for found, label in zip(classify(out, rows.texts), rows.labels, strict=True)]
    assert sum(right) / len(right) == pytest.approx(report.evaluation.accuracy)
    graph = onnx.load(out / "model.onnx").graph
    assert [node.name for node in graph.output] == ["logits"]
    assert described.outputs[0].shape == ("batch", len(set(rows.labels)))


@pytest.mark.parametrize("normalize", [False, True], ids=["as-is", "normalised"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_every_pooling_becomes_part_of_the_graph(pooling: str, normalize: bool, tmp_path: Path) -> None:
    check_agreement(encoder_with(tmp_path, pooling, normalize=normalize), WORDY, tmp_path / "out")


@pytest.mark.parametrize("family", ["distilbert", "roberta"])
def test_every_family_can_carry_a_head(family: str, tmp_path: Path) -> None:
    import_model(str(write_checkpoint(tmp_path / "source", family)), tmp_path / "encoder")
    check_agreement(tmp_path / "encoder", WORDY, tmp_path / "out")


def test_two_labels_get_two_logits(tiny_encoder: Path, tmp_path: Path) -> None:
    check_agreement(tiny_encoder, TWO, tmp_path / "out")
    assert manifest.load(tmp_path / "out").labels == ("no", "yes")


def write_lookup_encoder(directory: Path, opset: int, pooling: str = "max") -> Path:
    """Import the smallest encoder there is, a table of token states, exported with ``opset``."""
    source = write_checkpoint(directory / "source")
    (source / "model.safetensors").unlink()
    builder = GraphBuilder()
    rows = [[(token * 7 + column * 3) % 11 - 5.0 for column in range(4)] for token in range(400)]
    builder.op("Gather", [builder.constant(rows), "input_ids"], "last_hidden_state")
    shape = ["batch", "sequence"]
    names = ("input_ids", "attention_mask")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in names]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*shape, 4])
    model = builder.model(inputs, [output], "lookup")
    model.opset_import[0].version = opset
    onnx.save(model, source / "model.onnx")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": pooling}))
    import_model(str(source), directory / "encoder")
    return directory / "encoder"


@pytest.mark.parametrize("opset", [13, 17, 20])
@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_encoders_of_other_opsets_can_carry_a_head(opset: int, pooling: str, tmp_path: Path) -> None:
    check_agreement(write_lookup_encoder(tmp_path, opset, pooling), WORDY, tmp_path / "out")


def test_an_old_opset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="opset 11"):
        fit_head(write_lookup_encoder(tmp_path, 11), WORDY, tmp_path / "out")


def test_a_graph_that_disagrees_is_not_published(
    tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: onnx.ModelProto, described: Manifest, head: Linear) -> None:
        append_head(model, described, Linear(head.weight, head.bias[::-1] + 1.0))

    monkeypatch.setattr(fitting, "append_head", wrong)
    with pytest.raises(ModelRefusedError, match="cannot carry a head"):
        fit_head(tiny_encoder, WORDY, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# Rows


def test_a_test_file_is_measured_and_never_fitted(tiny_encoder: Path, tmp_path: Path) -> None:
    test = labelled({"mill": ("the mill",), "sky": ("the sun", "rain")}, "test.csv")
    _, report = fit_head(tiny_encoder, WORDY, tmp_path / "out", test=test)
    assert (report.fitted_rows, report.evaluation.held_out_rows) == (len(WORDY.texts), 3)


def test_the_hold_out_takes_its_share_of_every_label() -> None:
    labels = ["a"] * 10 + ["b"] * 5 + ["c"] * 2
    kept = fitting._stratified(labels, 0.2)
    counts = {label: sum(kept[index] for index in range(17) if labels[index] == label) for label in "abc"}
    assert counts == {"a": 2, "b": 1, "c": 1}
    assert (fitting._stratified(labels, 0.2) == kept).all()
    nearly_all = fitting._stratified(labels, 0.99)
    assert sum(nearly_all) == 9 + 4 + 1


def test_rows_are_read_from_csv_tsv_and_json_lines(tmp_path: Path) -> None:
    rows = [("a, b", "x"), ('say "c"\nd', "y"), ("a, b", "x")]
    path = write_csv(tmp_path / "rows.csv", ("body", "team"), rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as spreadsheets write it
    expected = Labelled("rows.csv", ("a, b", 'say "c"\nd'), ("x", "y"), 1)
    assert read_labelled(path, "body", "team") == expected
    (tmp_path / "rows.tsv").write_text("team\tbody\nx\ta, b\n", encoding="utf-8")
    assert read_labelled(tmp_path / "rows.tsv", "body", "team").texts == ("a, b",)
    lines = [json.dumps({"body": text, "team": index}) for index, (text, _) in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, "", ""]), encoding="utf-8")
    assert read_labelled(tmp_path / "rows.jsonl", "body", "team").labels == ("0", "1", "2")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"text,label\na,x\n,y\n", r"line 3: 'text' is empty"),
        ("rows.csv", b"text,label\na,x\nb, \n", r"line 3: 'label' is empty"),
        ("rows.csv", b"text,label\na\n", r"line 2: 'label' is missing"),
        ("rows.csv", b"text,team\na,x\n", r"no column 'label', only 'text', 'team'"),
        ("rows.csv", b"text,label\n", r"has no rows"),
        ("rows.csv", b"", r"has no rows"),
        ("rows.csv", b"text,label\n\xff\xfe,x\n", r"is not UTF-8"),
        ("rows.csv", b'text,label\n"a"b,x\n', r"is not valid CSV"),
        ("rows.xlsx", b"PK", r"unknown ending"),
        ("rows.jsonl", b'{"text": "a", "label": "x"}\n{"text": \n', r"line 2, is not valid JSON"),
        ("rows.jsonl", b"[1]\n", r"line 1, is a list"),
        ("rows.jsonl", b'{"text": 1.5, "label": "x"}\n', r"'text' is a number, it has to be a string"),
        ("rows.jsonl", b'{"text": "a", "label": null}\n', r"'label' is missing"),
    ],
)
def test_rows_that_cannot_be_used_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputFileError, match=message):
        read_labelled(tmp_path / name, "text", "label")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"absent\.csv cannot be read: No such file"):
        read_labelled(tmp_path / "absent.csv", "text", "label")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputFileError, match=r"folder\.csv cannot be read"):
        read_labelled(tmp_path / "folder.csv", "text", "label")


@pytest.mark.parametrize(
    ("rows", "test", "message"),
    [
        ({"a": ("one", "two")}, None, "the single label 'a'"),
        ({"a": ("one", "two"), "b": ("three",)}, None, "one row of label 'b'"),
        ({"a": ("one",), "b": ("two",)}, {"c": ("three",)}, "the label 'c', which rows.csv has not"),
    ],
)
def test_labels_that_cannot_be_fitted_or_measured_are_named(
    rows: dict[str, Sequence[str]],
    test: dict[str, Sequence[str]] | None,
    message: str,
    tiny_encoder: Path,
    tmp_path: Path,
) -> None:
    given = labelled(test, "test.csv") if test else None
    with pytest.raises(InputFileError, match=message):
        fit_head(tiny_encoder, labelled(rows), tmp_path / "out", test=given)


# Directories


def test_an_existing_directory_is_kept(tiny_encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="exists"):
        fit_head(tiny_encoder, WORDY, tmp_path)
    fit_head(tiny_encoder, WORDY, tmp_path / "out")
    described, _ = fit_head(tiny_encoder, TWO, tmp_path / "out", force=True)
    assert manifest.load(tmp_path / "out") == described


def test_only_an_encoder_takes_a_head(tiny_classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="needs an encoder"):
        fit_head(tiny_classifier, WORDY, tmp_path / "out")
    with pytest.raises(ModelRefusedError, match=r"gristmill\.json is missing"):
        fit_head(tmp_path, WORDY, tmp_path / "out")


# The command line


def test_the_commands_make_a_classifier_and_print_how_good_it_is(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    pairs = list(zip(WORDY.texts, WORDY.labels, strict=True))
    rows = write_csv(tmp_path / "rows.csv", ("body", "team"), [*pairs, pairs[0]])
    encoder, out = tmp_path / "encoder", tmp_path / "out"
    runner = CliRunner()
    result = runner.invoke(
        model_commands, ["import", str(source), "--out", str(encoder)], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert "48 tokens" in result.output
    arguments = ["fit-head", str(encoder), str(rows), "--text-column", "body", "--label-column", "team"]
    result = runner.invoke(
        model_commands, [*arguments, "--out", str(out), "--threads", "1"], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert "1 repeated rows" in result.output
    assert "3 labels, 3 rows held out" in result.output
    assert "macro F1" in result.output
    assert manifest.load(out).labels == ("mill", "road", "sky")


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gristmill_worker.models.fit_head")
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    arguments = ["fit-head", "encoder", "rows.csv", "--out", str(tmp_path / "out")]
    with pytest.raises(InputFileError, match=r"sklearn.*pip install 'gristmill\[worker,models\]'"):
        CliRunner().invoke(model_commands, arguments, catch_exceptions=False)


def test_the_command_group_imports_nothing_heavy() -> None:
    heavy = ("numpy", "onnx", "onnxruntime", "safetensors", "sklearn", "tokenizers")
    code = f"import sys; import gristmill_worker.models.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
