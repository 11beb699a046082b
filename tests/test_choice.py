"""`engine: auto`: the fastest that this CPU can run and that answers as the reference does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import onnx
import pytest

from conftest import Workers
from gristmill.client import Client
from gristmill.errors import ExitCode, InputFileError
from gristmill_worker.engines.choice import ANY, Choice, Wanted, assumed_speed, choose
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.importer import import_model
from gristmill_worker.models.manifest import Form, Manifest, ModelRefusedError, digest_files
from gristmill_worker.models.quantize.run import Request, quantize
from gristmill_worker.models.show import forms_of
from gristmill_worker.models.verdict import Verdict, save_verdict
from gristmill_worker.tune.run import TuneOptions, tune

AVX2 = frozenset({"avx2"})
AVX512 = AVX2 | {"avx512f"}
VNNI = AVX512 | {"avx512_vnni"}
BF16 = VNNI | {"avx512_bf16"}
AMX = BF16 | {"amx_bf16", "amx_int8"}


def add_form(directory: Path, name: str, engines: tuple[str, ...] = ("openvino",)) -> Manifest:
    """Add a form that says to be int8 and is a copy of the reference: what is chosen never runs here."""
    manifest = manifests.load(directory)
    file = f"{name}.onnx"
    (directory / file).write_bytes((directory / manifest.file).read_bytes())
    form = Form(
        file=file,
        precision="int8",
        engines=engines,
        method="copied",
        files=digest_files(directory, [file]),
    )
    manifest.model_copy(update={"forms": {**manifest.forms, name: form}}).write(directory)
    return manifests.load(directory)


@pytest.fixture
def model(tiny_encoder: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_encoder, tmp_path / "model")
    return tmp_path / "model"


def judge(model: Path, variant: Variant, *, passed: bool, cpu: str | None = None) -> None:
    key = variant.run_key()
    verdict = Verdict(
        key=key if cpu is None else key.model_copy(update={"cpu": cpu}),
        passed=passed,
        problems=() if passed else ("min cosine 0.71 is below 0.98",),
        shapes=(),
        figures={},
    )
    save_verdict(model, verdict)


def chosen(model: Path, wanted: Wanted = ANY, features: frozenset[str] = AMX) -> tuple[str, str, str]:
    choice = choose(model, manifests.load(model), wanted, features=features)
    return choice.variant.engine, choice.variant.form, choice.variant.precision


@pytest.mark.parametrize(
    ("features", "precision"), [(AMX, "bf16"), (BF16, "bf16"), (VNNI, "fp32"), (AVX2, "fp32")]
)
def test_bf16_is_for_cpus_that_have_it(model: Path, features: frozenset[str], precision: str) -> None:
    assert chosen(model, features=features) == ("openvino", "fp32", precision)


def test_a_quantized_form_is_taken_when_it_has_passed_its_check(model: Path) -> None:
    manifest = add_form(model, "int8-openvino")
    choice = choose(model, manifest, ANY, features=VNNI)
    assert choice.variant.form == "fp32"
    assert choice.rejected["openvino int8-openvino (int8)"].startswith("it was never checked")
    variant = Variant(model, "openvino", "int8-openvino", manifest.select("int8-openvino"))
    judge(model, variant, passed=True)
    assert chosen(model, features=VNNI) == ("openvino", "int8-openvino", "int8")
    # Where integers are slower than floats, they are not the choice either.
    assert chosen(model, features=AVX2) == ("openvino", "fp32", "fp32")


def test_what_failed_its_check_is_never_chosen_but_can_be_asked_for(model: Path) -> None:
    manifest = add_form(model, "int8-openvino")
    variant = Variant(model, "openvino", "int8-openvino", manifest.select("int8-openvino"))
    judge(model, variant, passed=False)
    choice = choose(model, manifest, Wanted(precision="fp32"), features=VNNI)
    assert choice.variant.form == "fp32"
    assert choice.rejected[str(variant)] == "it failed its check: min cosine 0.71 is below 0.98"
    with pytest.raises(InputFileError, match="form int8-openvino, precision fp32: it failed"):
        choose(model, manifest, Wanted(form="int8-openvino", precision="fp32"), features=VNNI)
    asked = choose(model, manifest, Wanted("openvino", "int8-openvino"), features=VNNI)
    assert asked.ranked == (variant,)
    # Another precision of the same form and engine that has passed goes first, and alone.
    passed = Variant(model, "openvino", "int8-openvino", manifest.select("int8-openvino"), "bf16")
    judge(model, passed, passed=True)
    assert choose(model, manifest, Wanted("openvino", "int8-openvino"), features=AMX).ranked == (passed,)


def test_the_reference_is_not_chosen_on_an_engine_where_it_failed(model: Path) -> None:
    manifest = manifests.load(model).select("fp32")
    for floats in ("bf16", "fp32"):
        judge(model, Variant(model, "openvino", "fp32", manifest, floats), passed=False)
    assert chosen(model) == ("onnxruntime", "fp32", "fp32")


def test_a_check_on_another_cpu_counts_for_where_there_was_none(model: Path) -> None:
    manifest = add_form(model, "int8-openvino")
    variant = Variant(model, "openvino", "int8-openvino", manifest.select("int8-openvino"))
    judge(model, variant, passed=True, cpu="another CPU")
    assert chosen(model, features=VNNI)[1] == "int8-openvino"
    judge(model, variant, passed=False)
    assert chosen(model, features=VNNI)[1] == "fp32"


def test_a_verdict_is_of_one_form_and_adding_another_changes_nothing(model: Path) -> None:
    manifest = add_form(model, "int8-openvino")
    before = manifest.select("int8-openvino").digest
    reference = manifest.select("fp32").digest
    judge(model, Variant(model, "openvino", "int8-openvino", manifest.select("int8-openvino")), passed=True)
    manifest = add_form(model, "int8-ort", ("onnxruntime",))
    assert manifest.select("int8-openvino").digest == before
    assert manifest.select("fp32").digest == reference
    assert chosen(model, features=VNNI)[1] == "int8-openvino"
    # The same name with other weights is another form.
    (model / "int8-openvino.onnx").write_bytes(b"other weights")
    forms = manifest.forms
    other = forms["int8-openvino"].model_copy(update={"files": digest_files(model, ["int8-openvino.onnx"])})
    manifest.model_copy(update={"forms": {**forms, "int8-openvino": other}}).write(model)
    assert chosen(model, features=VNNI)[1] == "fp32"


def test_of_what_was_measured_the_fastest_goes_first(model: Path) -> None:
    manifest = manifests.load(model)

    def fastest(speeds: dict[str, float]) -> Choice:
        return choose(model, manifest, ANY, measured=lambda v: speeds.get(str(v)), features=BF16)

    speeds = {"openvino fp32 (bf16)": 1.0, "openvino fp32 (fp32)": 3.0, "onnxruntime fp32 (fp32)": 2.0}
    assert str(fastest(speeds).variant) == "openvino fp32 (fp32)"
    assert fastest(speeds).reason == "the fastest of 3 that were measured on this CPU"
    # What was not measured is expected to be faster than the best that was.
    del speeds["openvino fp32 (bf16)"]
    assert str(fastest(speeds).variant) == "openvino fp32 (bf16)"
    assert "'gristmill-worker tune' measures" in fastest(speeds).reason


@pytest.mark.parametrize(
    ("wanted", "features", "said"),
    [
        (Wanted(precision="bf16"), VNNI, "bf16 needs a CPU with AVX512_BF16 or AMX"),
        (Wanted("onnxruntime", precision="bf16"), AMX, "onnxruntime computes floats in fp32 only"),
        (Wanted("onnxruntime", "int8-openvino"), AMX, "form 'int8-openvino' was made for openvino"),
        (Wanted("abacus"), AMX, "engine 'abacus' is unknown: use auto, openvino"),
        (Wanted("openvino", "int8-openvino", "bf16"), VNNI, "bf16 needs a CPU"),
    ],
)
def test_what_cannot_run_here_is_said_before_anything_is_loaded(
    model: Path, wanted: Wanted, features: frozenset[str], said: str
) -> None:
    manifest = add_form(model, "int8-openvino")
    with pytest.raises(InputFileError, match=said):
        choose(model, manifest, wanted, features=features)


def test_a_form_that_is_not_there_is_named_with_those_that_are(model: Path) -> None:
    manifest = add_form(model, "int8-openvino")
    with pytest.raises(ModelRefusedError, match="no form 'int4', but fp32, int8-openvino"):
        choose(model, manifest, Wanted(form="int4"))


def test_a_form_cannot_have_the_reference_s_name_or_files_elsewhere(model: Path) -> None:
    manifest = add_form(model, "int8-openvino")
    form = manifest.forms["int8-openvino"]
    other = {**form.files, manifest.file: "0" * 64}
    for forms, said in (
        (
            {"int8": form.model_copy(update={"files": other})},
            "file 'model.onnx'",
        ),
        ({"fp32": form}, "the name of the reference"),
        ({"int8": form.model_copy(update={"files": {"../x": "", **form.files}})}, "outside the directory"),
        ({"int8": form.model_copy(update={"files": {}})}, "no digest"),
        ({"Not A Name": form}, "pattern"),
    ):
        manifest.model_copy(update={"forms": forms}).write(model)
        with pytest.raises(ModelRefusedError, match=said):
            manifests.load(model)


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_form_is_refused_and_no_other(model: Path, damage: str) -> None:
    file = model / "int8-openvino.onnx"
    before = add_form(model, "int8-openvino")
    file.write_bytes(b"changed") if damage == "changed" else file.unlink()
    manifest = manifests.load(model)
    assert manifest.select("fp32").digest == before.select("fp32").digest
    assert manifest.digest == before.digest
    with pytest.raises(ModelRefusedError, match=r"'int8-openvino' cannot be used: .*int8-openvino\.onnx"):
        choose(model, manifest, Wanted(form="int8-openvino"))
    choice = choose(model, manifest, ANY)
    assert choice.variant.form == "fp32"
    assert "int8-openvino.onnx" in choice.rejected["int8-openvino"]
    _, rows = forms_of(model)
    assert [row.name for row in rows] == ["fp32", "int8-openvino"]
    assert rows[1].verdicts[0].startswith("damaged: ")
    with pytest.raises(ModelRefusedError, match="make the form again"):
        import_model(str(model), model.parent / "copy")
    quantize(Request(model, "int8-rows", name="int8-openvino", force=True))  # the way out
    assert manifests.load(model).damaged == {}


def only_for_onnxruntime(model: Path) -> Path:
    """Let the model's graph end with an operator that OpenVINO does not know."""
    manifest = manifests.load(model)
    graph = onnx.load(model / manifest.file)
    graph.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    name = graph.graph.output[0].name
    for node in graph.graph.node:
        node.output[:] = ["before" if output == name else output for output in node.output]
    graph.graph.node.append(onnx.helper.make_node("Binarizer", ["before"], [name], domain="ai.onnx.ml"))
    onnx.save(graph, model / manifest.file)
    manifest.model_copy(update={"files": digest_files(model, manifest.files)}).write(model)
    return model


def test_what_an_engine_cannot_load_gives_way_to_the_next(
    client: Client, workers: Workers, queue: str, model: Path
) -> None:
    only_for_onnxruntime(model)
    workers.start(model)
    events = [json.loads(line) for line in workers.log().read_text().splitlines()]
    passed_over = [event["variant"] for event in events if event["event"] == "engine_passed_over"]
    assert passed_over
    assert all(variant.startswith("openvino") for variant in passed_over)
    assert len(client.score(queue, "bread")) == 32
    (beat,) = client.workers(queue)
    assert beat["engine"] == "onnxruntime"
    # What was asked for is not replaced.
    process = workers.start(model, "--engine", "openvino", ready=False)
    assert process.wait(timeout=60) == ExitCode.BAD_INPUT
    assert "cannot run" in workers.log(1).read_text()


def test_tune_leaves_out_what_does_not_load(model: Path) -> None:
    only_for_onnxruntime(model)
    report = tune(TuneOptions(model, cores=(min(os.sched_getaffinity(0)),), seconds=1))
    assert report.variant.engine == "onnxruntime"
    assert report.refused
    assert all(name.startswith("openvino") for name in report.refused)


def test_the_forms_of_a_dense_model_are_not_taken_for_sparse(model: Path) -> None:
    manifest = add_form(model, "int8", ("deepsparse", "openvino"))
    form = manifest.select("int8")

    def speed(engine: str, sparsity: float) -> float:
        sparse = form.model_copy(update={"sparsity": sparsity})
        return assumed_speed(Variant(model, engine, "int8", sparse), VNNI)

    assert speed("deepsparse", 0.03) < speed("openvino", 0.03)  # rounding leaves some zeros
    assert speed("deepsparse", 0.9) > speed("openvino", 0.9)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--precision", "bf16", "--engine", "onnxruntime"], "onnxruntime computes floats in fp32 only"),
        (["--form", "int4"], "has no form 'int4', but fp32"),
        (["--engine", "abacus"], "engine"),
    ],
)
def test_a_worker_that_cannot_run_what_was_asked_for_ends_at_once(
    workers: Workers, model: Path, flags: list[str], said: str
) -> None:
    process = workers.start(model, *flags, ready=False)
    assert process.wait(timeout=60) == ExitCode.BAD_INPUT
    assert said in workers.log().read_text()


def test_wrong_settings_are_no_reason_to_try_another_engine(workers: Workers, model: Path) -> None:
    worker = workers.start(model, config="batch: {shapes: [[1, 9999]]}", ready=False)
    assert worker.wait(timeout=60) == ExitCode.BAD_INPUT
    log = workers.log().read_text()
    assert "the longest configured shape has 9999 tokens" in log.splitlines()[-1]
    assert "engine_chosen" in log
    assert "engine_passed_over" not in log
