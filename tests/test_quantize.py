"""Quantized forms: what is made, how near it is to fp32, and that a directory is never left half changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from checkpoints import write_checkpoint
from conftest import wait_until
from graphs import write_lookup
from gristmill.errors import InputFileError
from gristmill_worker.engines.base import example_inputs
from gristmill_worker.engines.choice import ANY, choose
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import calibration, inspect_onnx, manifest, speed
from gristmill_worker.models.answers import Answers
from gristmill_worker.models.cli import model as model_commands
from gristmill_worker.models.importer import import_model
from gristmill_worker.models.manifest import Manifest, ModelRefusedError
from gristmill_worker.models.quantize import kinds, run, store
from gristmill_worker.models.quantize.cli import quantize_command
from gristmill_worker.models.quantize.job import Options
from gristmill_worker.models.quantize.ort_graph import (
    Activation,
    Batch,
    Range,
    Rows,
    linear_layers,
    quantize_weight,
    quantized,
)
from gristmill_worker.models.quantize.run import Report, Request, quantize
from gristmill_worker.models.show import forms_of
from gristmill_worker.models.verdict import Verdict, save_verdict

KINDS = tuple(kinds.KINDS)
ORT_KINDS = tuple(kind for kind in KINDS if kind not in {"int8-openvino", "int8-deepsparse"})
FULL = Options(reduce_range=False)


@pytest.fixture
def encoder(tiny_encoder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny encoder to add forms to."""
    return Path(shutil.copytree(tiny_encoder, tmp_path / "model"))


@pytest.fixture(autouse=True)
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time as little as possible: no test looks at speed."""
    monkeypatch.setattr(speed, "_ROUNDS", 1)
    monkeypatch.setattr(speed, "_SLOT_S", 0.0)
    monkeypatch.setattr(run, "_HELD_OUT", 32)
    monkeypatch.setattr(run, "_TRIAL", 16)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(model_commands, [str(argument) for argument in arguments])


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def product(
    activation: Activation, x: Any, weight: Any, *, reduce_range: bool = False, opset: int = 17
) -> Any:
    """Return x @ weight by onnxruntime, with ``activation`` in int8."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "sequence", weight.shape[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "sequence", weight.shape[1]])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return answer(quantized(model, {"y": activation}, reduce_range=reduce_range), x)


def answer(model: onnx.ModelProto, x: Any) -> Any:
    import onnxruntime  # noqa: PLC0415

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


# --- what is made


@pytest.mark.parametrize("kind", KINDS)
def test_a_form_is_added_beside_the_others_and_runs(encoder: Path, kind: str) -> None:
    before = manifest.load(encoder)
    report = quantize(Request(encoder, kind, options=FULL))
    after = manifest.load(encoder)
    assert after == report.manifest
    assert after.form_names == ("fp32", kind)
    assert after.select("fp32").digest == before.digest
    assert report.form.precision == "int8"
    assert report.form_bytes == sum((encoder / file).stat().st_size for file in report.form.files)
    for found in report.comparisons:
        assert 1 - found.worst > 0.98
        assert 1 - found.mean > 0.99
        assert found.same_label is None
    selected = after.select(kind)
    runs_here = report.comparisons[0].variant.engine
    engine = Variant(encoder, runs_here, kind, selected).load([(2, 16)], 1)
    outputs = engine.run(example_inputs(selected.inputs, (2, 16)))
    assert outputs["last_hidden_state"].shape == (2, 16, 32)
    engine.close()
    assert not list(encoder.glob(".quantize*"))


def test_labels_of_a_classifier_are_compared_too(tiny_classifier: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_classifier, tmp_path / "model"))
    report = quantize(Request(model, "int8-rows", name="rows.v2"))
    assert manifest.load(model).form_names == ("fp32", "rows.v2")
    same = report.comparisons[0].same_label
    assert same is not None
    assert same > 0.9


@pytest.mark.parametrize("labels", [("spam",), ("yes", "no")])
def test_classifiers_are_judged_by_probabilities(tmp_path: Path, labels: tuple[str, ...]) -> None:
    """The cosine of one logit is 1 or -1, and that of two says nothing of what is between them."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", head=labels)
    import_model(str(checkpoint), tmp_path / "model")
    model = tmp_path / "model"
    answers = Answers(model, manifest.load(model))
    right, wrong = (np.full(len(labels), value) for value in (0.1, 0.9))
    assert answers.difference((wrong,), (right,)) == pytest.approx(0.8)
    assert answers.same_label([(wrong,), (right,)], [(right,), (right,)]) == (0.5 if len(labels) == 1 else 1)
    options = Options(max_difference=0.0, max_float_share=0.1)
    report = quantize(Request(model, "int8-ort", options=options))
    (found,) = report.comparisons
    assert 0 < found.mean <= found.worst < 0.2
    assert "largest difference of a probability" in report.notes[0]
    assert "The goal of 0 was not reached" in report.notes[1]
    printed = invoke("quantize", model, "--form", "int8-rows", "--max-difference", 0).stdout
    assert "differences of probabilities from fp32" in printed
    assert "beyond the 0 that --max-difference asks for" in printed


@pytest.mark.parametrize("kind", ["int8-openvino", "int8-deepsparse", "int8-ort"])
def test_calibration_runs_on_the_threads_asked_for(
    encoder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import nncf  # noqa: PLC0415

    seen: set[int] = set()

    def session(path: Path, names: Any, threads: int) -> Any:
        seen.add(threads)
        return calibration_session(path, names, threads)

    def nncf_quantize(*arguments: Any, **options: Any) -> Any:
        seen.add(len(os.sched_getaffinity(0)))
        return quantize_by_nncf(*arguments, **options)

    calibration_session, quantize_by_nncf = calibration._session, nncf.quantize
    monkeypatch.setattr(calibration, "_session", session)
    monkeypatch.setattr(nncf, "quantize", nncf_quantize)
    before = os.sched_getaffinity(0)
    quantize(Request(encoder, kind, threads=1))
    assert seen == {1}
    assert os.sched_getaffinity(0) == before


def test_an_engine_that_refuses_the_form_is_not_among_its_engines(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(variant: Variant, *arguments: Any, **options: Any) -> Any:
        if variant.engine in refusing and variant.form != "fp32":
            raise ModelRefusedError(f"{variant.engine} will not")
        return load_variant(variant, *arguments, **options)

    load_variant, refusing = Variant.load, ["openvino"]
    monkeypatch.setattr(Variant, "load", load)
    report = quantize(Request(encoder, "int8-rows"))
    assert manifest.load(encoder).forms["int8-rows"].engines == report.form.engines == ("onnxruntime",)
    assert {found.variant.engine for found in report.comparisons} == {"onnxruntime"}
    assert report.notes == ("The form is not for openvino: openvino will not",)
    refusing.append("onnxruntime")
    with pytest.raises(ModelRefusedError, match="no engine runs the form: onnxruntime will not"):
        quantize(Request(encoder, "int8-rows", name="again"))
    assert manifest.load(encoder).form_names == ("fp32", "int8-rows")


def test_a_new_form_is_not_used_before_it_is_checked(encoder: Path) -> None:
    quantize(Request(encoder, "int8-rows"))
    choice = choose(encoder, manifest.load(encoder), ANY)
    assert choice.variant.form == "fp32"
    assert any("never checked" in reason for name, reason in choice.rejected.items() if "rows" in name)


def test_minilm_in_int8_stays_near_to_fp32(minilm: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(minilm, tmp_path / "model"))
    limits = {
        "int8-rows": (0.993, 0.997),
        "int8-openvino": (0.99, 0.996),
        "int8-deepsparse": (0.99, 0.996),
    }
    for kind, (least, mean) in limits.items():
        report = quantize(Request(model, kind, calibration_texts=128, options=FULL))
        # Only the form for DeepSparse keeps its tables in float.
        assert report.form_bytes < (0.7 if kind == "int8-deepsparse" else 0.3) * report.reference_bytes
        for found in report.comparisons:
            assert 1 - found.worst > least, found
            assert 1 - found.mean > mean, found
            assert 1 - found.neighbours > 0.9995, found
    assert manifest.load(model).form_names == ("fp32", *limits)


def test_the_layers_that_suffer_most_stay_in_float(minilm: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(minilm, tmp_path / "model"))
    options = Options(min_cosine=0.993, reduce_range=False)
    report = quantize(Request(model, "int8-ort", calibration_texts=64, options=options))
    assert report.notes[0].startswith(tuple(f"{count} of 36 layers stay in float" for count in range(1, 10)))
    assert "outer/product" in report.notes[0]  # behind GELU, whose outliers stretch the range
    # Texts that are unlike those of the calibration lose more: the ranges cut off what is beyond them.
    assert 1 - report.comparisons[0].worst > 0.97
    assert 1 - report.comparisons[0].mean > 0.99
    assert 1 - report.comparisons[0].neighbours > 0.999
    graph = inspect_onnx.read_graph(model / report.form.file)
    kept = len(linear_layers(graph))
    assert f"{kept} of 36 layers in float" in report.form.method


@pytest.mark.parametrize("calibration", ["percentile", "entropy"])
def test_histograms_give_ranges_too(encoder: Path, calibration: Any) -> None:
    options = Options(calibration=calibration, min_cosine=0.0)
    report = quantize(Request(encoder, "int8-ort", calibration_texts=16, options=options))
    assert 1 - report.comparisons[0].worst > 0.9
    assert calibration in report.form.method


def test_a_goal_out_of_reach_is_said(encoder: Path) -> None:
    options = Options(min_cosine=1.0, max_float_share=0.1)
    report = quantize(Request(encoder, "int8-ort", options=options))
    assert "was not reached with up to 1 layers" in report.notes[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_seven_bit_weights_are_made_and_named(encoder: Path, kind: str) -> None:
    report = quantize(Request(encoder, kind, options=Options(reduce_range=True)))
    assert "7-bit" in report.form.method
    if kind in ORT_KINDS:
        graph = inspect_onnx.read_graph(encoder / report.form.file)
        weights = [
            numpy_helper.to_array(tensor)
            for tensor in graph.graph.initializer
            if tensor.data_type == TensorProto.INT8 and len(tensor.dims) == 2 and "weight/int8" in tensor.name
        ]
        layers = [array for array in weights if array.shape[0] in {32, 64} and array.shape[1] in {32, 64}]
        assert layers
        assert max(np.abs(array).max() for array in layers) == 63


# --- the arithmetic


def test_a_weight_has_one_scale_a_column() -> None:
    weight = np.array([[1.0, -0.001], [-2.0, 0.004]], np.float32)
    integers, scale = quantize_weight(weight, 127)
    assert integers.dtype == np.int8
    assert integers.tolist() == [[64, -32], [-127, 127]]
    assert np.allclose(integers * scale, weight, atol=scale / 2)


def test_zero_is_exact_in_any_range() -> None:
    for low, high in ((-3.0, 5.0), (0.5, 2.0), (-4.0, -1.0), (0.0, 0.0)):
        scale, zero_point = Range(low, high).scale_and_zero_point()
        assert 0 <= zero_point <= 255
        assert scale > 0
        assert scale * (0 - zero_point) <= min(low, 0.0) + scale / 2
        assert scale * (255 - zero_point) >= max(high, 0.0) - scale / 2


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_a_row_does_not_see_the_outlier_of_another(opset: int) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(64, 32)).astype(np.float32)
    x = rng.normal(size=(1, 3, 64)).astype(np.float32)
    x[0, 1] *= 1000.0
    x[0, 2] = 0.0
    exact = x @ weight
    by_rows = product(Rows(), x, weight, opset=opset)
    by_batch = product(Batch(), x, weight, opset=opset)
    assert np.abs(by_rows - exact)[0, 0].max() < 0.5
    assert np.abs(by_rows - exact)[0, 1].max() < 500
    assert (by_rows[0, 2] == 0).all()
    assert np.abs(by_batch - exact)[0, 0].max() > 2


def test_layers_of_one_input_may_be_quantized_in_different_ways() -> None:
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=(16, 8)).astype(np.float32) for _ in range(3)]
    graph = helper.make_graph(
        [
            *(helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(3)),
            helper.make_node("Sum", ["y0", "y1", "y2"], ["y"]),
        ],
        "three",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "sequence", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "sequence", 8])],
        [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = rng.normal(size=(2, 5, 16)).astype(np.float32)
    made = quantized(model, {"y0": Rows(), "y1": Range(-4, 4), "y2": Batch()}, reduce_range=False)
    assert np.abs(answer(made, x) - x @ sum(weights)).max() < 0.4


# --- what a directory is left like


def test_the_same_form_is_replaced_with_force_alone(encoder: Path) -> None:
    quantize(Request(encoder, "int8-rows", options=FULL))
    quantize(Request(encoder, "int8-ort-dynamic", options=FULL))
    before = manifest.load(encoder)
    with pytest.raises(InputFileError, match="--force"):
        quantize(Request(encoder, "int8-rows"))
    quantize(Request(encoder, "int8-rows", options=Options(reduce_range=True), force=True))
    after = manifest.load(encoder)
    for same in ("fp32", "int8-ort-dynamic"):
        assert after.select(same).digest == before.select(same).digest
    assert after.select("int8-rows").digest != before.select("int8-rows").digest
    names = {path.name for path in encoder.iterdir() if not path.name.startswith("selftest-")}
    assert names == {*after.all_files, manifest.FILE_NAME}


@pytest.mark.parametrize("step", ["write", "replace"])
def test_an_interruption_at_the_end_leaves_the_old_directory(
    encoder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    quantize(Request(encoder, "int8-rows", options=FULL))
    before = contents(encoder)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    request = Request(encoder, "int8-rows", options=Options(reduce_range=True), force=True)
    with monkeypatch.context() as patch:
        patch.setattr(*((Manifest, "write", interrupt) if step == "write" else (Path, "replace", interrupt)))
        with pytest.raises(KeyboardInterrupt):
            quantize(request)
    assert contents(encoder) == before
    quantize(request)
    assert "7-bit" in manifest.load(encoder).forms["int8-rows"].method


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_in_the_middle_leaves_nothing(minilm: Path, tmp_path: Path, number: int) -> None:
    model = Path(shutil.copytree(minilm, tmp_path / "model"))
    before = sorted(path.name for path in model.iterdir())
    command = [
        sys.executable,
        "-m",
        "gristmill_worker",
        "model",
        "quantize",
        str(model),
        "--form",
        "int8-ort",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    wait_until(lambda: list(model.glob(".quantize-*")))
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    assert sorted(path.name for path in model.iterdir()) == before
    manifest.load(model)


def test_the_folder_of_a_killed_process_is_removed_and_one_in_use_is_not(encoder: Path) -> None:
    stale = encoder / ".quantize-stale"
    stale.mkdir()
    (stale / "model.onnx").write_bytes(b"half a model")
    with store.working_folder(encoder) as used:
        assert not stale.exists()
        with store.working_folder(encoder) as other:
            assert used.is_dir()
            assert other != used
    assert not list(encoder.glob(".quantize-*"))


def test_a_directory_that_changed_meanwhile_is_left_alone(
    encoder: Path, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(job: Any) -> Any:
        made = kinds.find_kind("int8-rows")(job)
        for path in encoder.iterdir():
            if path.is_file():
                path.unlink()
        shutil.copytree(tiny_classifier, encoder, dirs_exist_ok=True)
        (job.model_dir / "model.onnx").write_bytes((tiny_classifier / "model.onnx").read_bytes())
        return made

    monkeypatch.setattr(run, "find_kind", lambda _: replaced)
    monkeypatch.setattr(run, "_compare", lambda _job, _name, form, _held: (form, [], []))
    with pytest.raises(ModelRefusedError, match="changed meanwhile"):
        quantize(Request(encoder, "int8-rows"))
    assert contents(encoder) == contents(tiny_classifier)


@pytest.mark.parametrize("kind", ["int8-rows", "int8-openvino"])
def test_openvino_and_nncf_report_nothing_home_and_print_nothing(
    encoder: Path, tmp_path: Path, kind: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-m", "gristmill_worker", "model", "quantize", str(encoder)]
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {"HOME": str(home)}
    done = subprocess.run(
        [*command, "--form", kind], env=environment, capture_output=True, text=True, check=True
    )
    assert not list(home.iterdir())
    assert done.stdout.startswith(f"{kind} is in ")
    assert "INFO" not in done.stdout + done.stderr
    assert "Statistics collection" not in done.stdout


# --- what is refused


def test_models_and_texts_that_cannot_be_used_are_refused(encoder: Path, tmp_path: Path) -> None:
    import_model(str(write_lookup(tmp_path / "lookup")), tmp_path / "tensors")
    with pytest.raises(ModelRefusedError, match="takes tensors"):
        quantize(Request(tmp_path / "tensors", "int8-ort"))
    with pytest.raises(InputFileError, match="use one of int8-rows"):
        quantize(Request(encoder, "int4"))
    with pytest.raises(InputFileError, match="is the reference"):
        quantize(Request(encoder, "int8-ort", name="fp32"))
    texts = tmp_path / "texts.csv"
    texts.write_text("text\n" + "a mill\n" * 50 + "\n")
    with pytest.raises(InputFileError, match="has 1 different texts in the column 'text'"):
        quantize(Request(encoder, "int8-ort", texts=texts))
    with pytest.raises(InputFileError, match="'body'"):
        quantize(Request(encoder, "int8-ort", texts=texts, text_column="body"))
    with pytest.raises(InputFileError):
        quantize(Request(encoder, "int8-ort", texts=tmp_path / "missing.csv"))
    assert manifest.load(encoder).form_names == ("fp32",)


def test_a_model_that_is_int8_already_is_refused(encoder: Path, tmp_path: Path) -> None:
    report = quantize(Request(encoder, "int8-rows"))
    source = tmp_path / "export"
    source.mkdir()
    shutil.copyfile(encoder / report.form.file, source / "model.onnx")
    for name in ("tokenizer.json", "config.json"):
        shutil.copyfile(encoder / name, source / name)
    import_model(str(source), tmp_path / "int8")
    with pytest.raises(ModelRefusedError, match="is int8 already"):
        quantize(Request(tmp_path / "int8", "int8-rows"))


def test_a_directory_that_cannot_be_written_is_refused_before_any_work(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere
    with pytest.raises(InputFileError, match=r"cannot be written \(Permission denied\)"):
        quantize(Request(encoder, "int8-rows"))


def test_a_name_that_no_form_can_have_is_refused_before_any_work(encoder: Path) -> None:
    with pytest.raises(InputFileError, match="'Big Form'"):
        quantize(Request(encoder, "int8-rows", name="Big Form"), say=pytest.fail)


def test_a_missing_package_is_named(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    monkeypatch.delitem(sys.modules, kinds.KINDS["int8-openvino"][0], raising=False)
    result = invoke("quantize", encoder, "--form", "int8-openvino")
    assert isinstance(result.exception, InputFileError)
    assert "pip install 'gristmill[worker,quantize]'" in str(result.exception)


# --- the command line


def test_the_command_says_what_was_made_and_what_to_do(encoder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    words = ["the", "mill", "turns", "slow", "and", "the", "water", "falls", "warm", "on", "old", "stone"]
    rows = [" ".join(words[at % 11 :] + words[: at % 7]) + f" {at}" for at in range(60)]
    texts.write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    result = invoke(
        *("quantize", encoder, "--form", "int8-ort-dynamic", "--texts", texts, "--text-column", "body")
    )
    assert result.exit_code == 0, result.output
    assert "int8-ort-dynamic is in" in result.stdout
    assert "cosine to fp32 of 20 held-out texts" in result.stdout
    assert "a text's answer depends on the texts beside it" in result.stdout
    assert f"run 'gristmill-worker model check {encoder}'" in result.stdout


def test_show_lists_forms_and_verdicts(encoder: Path) -> None:
    quantize(Request(encoder, "int8-rows"))
    whole = manifest.load(encoder)
    rows = Variant(encoder, "onnxruntime", "int8-rows", whole.select("int8-rows"))
    save_verdict(
        encoder, Verdict(key=rows.run_key(), passed=True, problems=(), shapes=((1, 16),), figures={})
    )
    _, listed = forms_of(encoder)
    assert [row.name for row in listed] == ["fp32", "int8-rows"]
    assert listed[1].engines == ("onnxruntime", "openvino")
    assert listed[1].verdicts == ("onnxruntime int8: passed",)
    assert listed[0].verdicts == ()
    result = invoke("show", encoder)
    assert result.exit_code == 0
    assert whole.forms["int8-rows"].file in result.stdout
    assert "the imported model" in result.stdout


def test_a_report_is_of_the_form_alone(encoder: Path) -> None:
    first: Report = quantize(Request(encoder, "int8-rows"))
    second: Report = quantize(Request(encoder, "int8-ort"))
    assert set(second.manifest.forms) == {"int8-rows", "int8-ort"}
    assert not set(first.form.files) & set(second.form.files)


@pytest.mark.parametrize(
    "flags",
    [["--sparsity", "0.5"], ["--attention"], ["--calibration", "entropy"], ["--max-float", "0.1"]],
)
def test_an_option_of_another_kind_of_form_is_not_ignored(encoder: Path, flags: list[str]) -> None:
    done = CliRunner().invoke(quantize_command, [str(encoder), "--form", "int8-rows", *flags])
    assert done.exit_code == 2
    assert f"{flags[0]} is for --form int8-" in done.output
    assert manifest.load(encoder).form_names == ("fp32",)
