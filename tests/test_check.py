"""The model check and the self-test: what is damaged is found, by the right limit; what is not passes."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from rich.console import Console
from structlog.testing import capture_logs

from conftest import Workers, wait_until
from damaged import (
    answering_by_chance,
    answering_nan,
    copy_with_forms,
    mixing_batch_mates,
    nothing,
    other_labels,
    other_weights,
    reading_padding,
    wrong_at,
)
from graphs import write_lookup, write_square
from gristmill import Client
from gristmill.errors import ExitCode, InputFileError
from gristmill_worker.batching.shapes import default_shapes
from gristmill_worker.cpus import cpu_features
from gristmill_worker.engines.base import Array, Engine, EngineError, Shape
from gristmill_worker.engines.choice import NATIVE_BF16, Wanted, choose
from gristmill_worker.engines.variant import Variant
from gristmill_worker.loading import load_model
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models import self_test as self_testing
from gristmill_worker.models.answers import Answers
from gristmill_worker.models.batch_run import run_texts
from gristmill_worker.models.check import own_process
from gristmill_worker.models.check.metric import macro_f1, spearman
from gristmill_worker.models.check.report import print_report
from gristmill_worker.models.check.run import CheckOptions, check
from gristmill_worker.models.check.texts import check_items
from gristmill_worker.models.documentation import documentation
from gristmill_worker.models.importer import import_model
from gristmill_worker.models.labelled import Labelled, ScoredPairs, read_pairs
from gristmill_worker.models.manifest import ModelRefusedError
from gristmill_worker.models.records import save_record
from gristmill_worker.models.self_test import (
    ensure_agreement,
    note_not_in_one,
    own_shapes,
    probe_items,
    reference_of,
    self_test,
)
from gristmill_worker.models.verdict import Verdict, load_verdict, save_verdict
from gristmill_worker.settings import BatchSettings, Settings
from gristmill_worker.tasks.base import make_task

ODD_LENGTH = 24  # no shape of the default grid; a tuned worker might use it
DAMAGES = {
    "right": nothing,
    "weights": other_weights,
    "mates": mixing_batch_mates,
    "padding": reading_padding,
    "length": wrong_at(32),
    "odd-length": wrong_at(ODD_LENGTH),
    "nan": answering_nan,
    "chance": answering_by_chance,
}


def run_check(model: Path, *flags: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``model check`` as a process and expect its exit code."""
    command = [sys.executable, "-m", "gristmill_worker", "model", "check", str(model), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def variant_of(model: Path, form: str, engine: str = "onnxruntime") -> Variant:
    return Variant(model, engine, form, manifests.load(model).select(form))


Checked = tuple[Path, str, dict[str, Any]]  # directory, what was printed, entry of the JSON by form


@pytest.fixture(scope="module")
def damaged(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """All damaged forms of an encoder, checked by one command."""
    folder = tmp_path_factory.mktemp("damaged")
    model = copy_with_forms(tiny_encoder, folder / "model", DAMAGES)
    done = run_check(
        model, "--engine", "onnxruntime", "--json", folder / "report.json", code=ExitCode.FAILURE
    )
    report = json.loads((folder / "report.json").read_text())
    assert not report["passed"]
    return model, done.stdout, {entry["variant"].split()[1]: entry for entry in report["variants"]}


class TestDamagedForms:
    @pytest.mark.parametrize(
        ("form", "problem"),
        [
            ("weights", "agreement with the reference: cosine"),
            ("mates", "batch invariance: cosine"),
            ("padding", "padding invariance: cosine"),
            ("length", "shapes (1x32, 2x32, 4x32"),
            ("odd-length", f"shapes (2x{ODD_LENGTH}): worst 2x{ODD_LENGTH}, cosine"),
            ("nan", "agreement with the reference: it fails, or answers NaN or infinity"),
            ("chance", "determinism"),
        ],
    )
    def test_each_is_found_by_its_limit_and_gets_a_verdict(
        self, damaged: Checked, form: str, problem: str
    ) -> None:
        model, printed, entries = damaged
        entry = entries[form]
        assert not entry["passed"]
        assert any(problem in found for found in entry["problems"]), entry["problems"]
        assert f"onnxruntime {form} (int8): " in printed
        verdict = load_verdict(model, variant_of(model, form).run_key())
        assert verdict is not None
        assert not verdict.passed
        assert verdict.key.model == manifests.load(model).select(form).digest

    def test_the_reference_and_a_right_form_pass(self, damaged: Checked) -> None:
        model, _, entries = damaged
        assert [name for name, entry in entries.items() if entry["passed"]] == ["fp32", "right"]
        figures = entries["right"]["figures"]
        assert figures["agreement_worst_cosine"] > 1 - 1e-9
        assert figures["padding_worst_cosine"] > 1 - 1e-9
        assert figures["memory_mb"] > 0
        assert figures["speed_1x32"] > 0
        verdict = load_verdict(model, variant_of(model, "right").run_key())
        assert verdict is not None
        assert set(default_shapes(48)) <= set(verdict.shapes)

    def test_a_fault_at_one_length_leaves_the_mean_and_all_other_shapes_right(self, damaged: Checked) -> None:
        entry = damaged[2]["odd-length"]
        assert len(entry["problems"]) == 1  # the sweep's alone
        assert entry["figures"]["agreement_worst_cosine"] > 1 - 1e-9
        wrong = [shape for shape, found in entry["differences_by_shape"].items() if found > 1e-6]
        assert wrong == [f"2x{ODD_LENGTH}"]
        shapes = damaged[2]["length"]["differences_by_shape"]
        assert {shape.split("x")[1] for shape, found in shapes.items() if found > 1e-6} == {"32"}

    def test_batch_mates_change_no_text_that_is_alone(self, damaged: Checked) -> None:
        shapes = damaged[2]["mates"]["differences_by_shape"]
        assert all(found < 1e-6 for shape, found in shapes.items() if shape.startswith("1x"))

    def test_auto_takes_no_form_that_failed(self, damaged: Checked) -> None:
        model, _, _ = damaged
        manifest = manifests.load(model)
        for form in DAMAGES:
            if form != "right":
                with pytest.raises(InputFileError, match="it failed its check"):
                    choose(model, manifest, Wanted(form=form))
        assert choose(model, manifest, Wanted(engine="onnxruntime")).variant.form in ("fp32", "right")

    def test_a_limit_of_ones_own_goes_before_the_default(self, damaged: Checked, tmp_path: Path) -> None:
        model = Path(shutil.copytree(damaged[0], tmp_path / "model"))
        flags = [
            "--engine",
            "onnxruntime",
            "--form",
            "mates",
            "--min-cosine",
            0,
            "--min-invariance-cosine",
            0,
        ]
        run_check(model, *flags)
        verdict = load_verdict(model, variant_of(model, "mates").run_key())
        assert verdict is not None
        assert verdict.passed
        assert verdict.limits["min_cosine"] == 0

    def test_a_classifier_with_other_labels_fails_and_loses_its_accuracy(
        self, tiny_classifier: Path, tmp_path: Path
    ) -> None:
        model = copy_with_forms(tiny_classifier, tmp_path / "model", {"labels": other_labels})
        right = right_labels(tiny_classifier)
        rows = tmp_path / "rows.csv"
        with rows.open("w", newline="") as file:
            csv.writer(file).writerows([("body", "kind"), *right])
        flags = ["--engine", "onnxruntime", "--data", rows, "--text-column", "body", "--label-column", "kind"]
        run_check(model, *flags, "--json", tmp_path / "report.json", code=ExitCode.FAILURE)
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["reference_metric"]["accuracy"] == 1.0
        (entry,) = (entry for entry in report["variants"] if " labels " in entry["variant"])
        assert entry["figures"]["accuracy_drop_points"] > 50
        found = " ".join(entry["problems"])
        assert all(name in found for name in ("label agreement", "accuracy", "macro_f1"))


def right_labels(model: Path) -> list[tuple[str, str]]:
    """Return texts with the labels that the model itself gives them."""
    nouns, verbs = ("mill", "wheel", "cart", "rain"), ("turns", "stops", "falls")
    texts = [f"the {noun} {verb}" for noun in nouns for verb in verbs]
    manifest = manifests.load(model)
    task = make_task(model, manifest, truncate=True)
    values = run_texts(model, manifest, task, [{"text": text} for text in texts], task.decode, 1)
    return [(text, value[0]["label"]) for text, value in zip(texts, values, strict=True)]


class TestCheck:
    def test_openvino_passes_and_auto_may_choose_it(self, tiny_classifier: Path, tmp_path: Path) -> None:
        model = Path(shutil.copytree(tiny_classifier, tmp_path / "model"))
        report = check(CheckOptions(model, Wanted(engine="openvino")))
        assert report.passed, [entry.verdict.problems for entry in report.judged]
        precisions = {entry.variant.precision for entry in report.judged}
        assert precisions == ({"fp32", "bf16"} if cpu_features() & NATIVE_BF16 else {"fp32"})
        variant = choose(model, manifests.load(model), Wanted(engine="openvino")).variant
        verdict = load_verdict(model, variant.run_key())
        assert verdict is not None
        assert verdict.passed
        assert set(default_shapes(48)) <= set(verdict.shapes)
        assert {batch for batch, _ in verdict.shared_shapes} == {2}  # those that tuning might choose
        assert (2, ODD_LENGTH) not in verdict.shapes
        assert verdict.threads == 1

    def test_pairs_are_ranked_and_a_rank_lost_is_a_drop(self, damaged: Checked, tmp_path: Path) -> None:
        first = ("the mill turns", "the rain falls", "a mill", "bread and flour")
        second = ("the mill turns", "the rain stops", "a horse and a cart", "water")
        pairs = ScoredPairs("pairs", first, second, (5.0, 4.0, 1.0, 0.0))
        model = Path(shutil.copytree(damaged[0], tmp_path / "model"))
        texts = tmp_path / "texts.csv"
        texts.write_text("text\n" + "\n".join(f"the mill turns {count} times" for count in range(20)))
        limits: dict[str, float | None] = {"max_drop": -300.0}  # no figure can be so much better
        options = CheckOptions(model, Wanted("onnxruntime", "right"), texts=texts, data=pairs, limits=limits)
        report = check(options)
        (entry,) = report.judged
        assert entry.verdict.figures["spearman"] == report.reference_metric["spearman"]
        assert entry.verdict.figures["spearman_drop_points"] == 0
        assert [problem.split(":")[0] for problem in entry.verdict.problems] == ["spearman"]

    def test_a_directory_that_cannot_be_written_is_said_and_changes_no_verdict(
        self, damaged: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_arguments: object, **_options: object) -> None:
            raise OSError(30, "Read-only file system")

        model = copy_with_forms(damaged[0], tmp_path / "model", {"nan": answering_nan})
        monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
        report = check(CheckOptions(model, Wanted("onnxruntime", "nan")))
        assert not report.passed
        assert report.not_stored is not None
        assert "Read-only file system" in report.not_stored
        assert list(model.glob("check-*")) == []

    def test_a_variant_whose_process_was_killed_has_no_verdict_and_others_keep_theirs(
        self, damaged: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def call(function: Any, job: Any) -> Any:
            if job.variant.form == "nan":
                raise own_process.ProcessDiedError(-signal.SIGKILL)
            if job.variant.form == "weights":
                raise own_process.ProcessDiedError(-signal.SIGSEGV)
            return function(job)

        model = copy_with_forms(
            damaged[0], tmp_path / "model", {"right": nothing, "nan": answering_nan, "weights": other_weights}
        )
        monkeypatch.setattr(own_process, "call", call)
        report = check(CheckOptions(model, Wanted("onnxruntime")))
        assert not report.passed
        assert report.killed == {"onnxruntime nan (int8)": "its process ended (signal SIGKILL)"}
        assert load_verdict(model, variant_of(model, "nan").run_key()) is None
        for form, passed in (("right", True), ("weights", False)):
            verdict = load_verdict(model, variant_of(model, form).run_key())
            assert verdict is not None
            assert verdict.passed is passed
        with Console(record=True, width=200, file=io.StringIO()) as console:
            print_report(console, report)
        assert "not judged: onnxruntime nan (int8): its process ended" in console.export_text()

    def test_an_interruption_keeps_the_verdicts_that_were_found(
        self, damaged: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def call(function: Any, job: Any) -> Any:
            if job.variant.form == "nan":
                raise KeyboardInterrupt
            return function(job)

        model = copy_with_forms(damaged[0], tmp_path / "model", {"nan": answering_nan})
        monkeypatch.setattr(own_process, "call", call)
        with pytest.raises(KeyboardInterrupt):
            check(CheckOptions(model, Wanted("onnxruntime")))
        assert load_verdict(model, variant_of(model, "fp32").run_key()) is not None
        assert load_verdict(model, variant_of(model, "nan").run_key()) is None

    def test_tensors_are_compared_on_random_ones(self, tmp_path: Path) -> None:
        for write in (write_square, write_lookup):
            model = tmp_path / write.__name__
            import_model(str(write(tmp_path / f"{write.__name__}-source")), model)
            report = check(CheckOptions(model))
            assert report.passed, [entry.verdict.problems for entry in report.judged]
            assert {entry.variant.engine for entry in report.judged} == {"openvino", "onnxruntime"}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"wanted": Wanted(engine="null")}, "computes nothing"),
            ({"wanted": Wanted("onnxruntime", precision="bf16")}, "fp32 only"),
            ({"data": Labelled("rows.csv", ("a",), ("sand",), 0)}, r"rows.csv has the label 'sand'"),
            ({"data": ScoredPairs("p.csv", ("a",), ("b",), (1.0,))}, "they measure embeddings"),
            ({"cores": (4095,)}, "cannot be used"),
            ({"texts": "rows.csv"}, "no text in the column 'text'"),
        ],
    )
    def test_what_cannot_be_checked_is_said(
        self, tiny_classifier: Path, tmp_path: Path, options: Mapping[str, Any], message: str
    ) -> None:
        (tmp_path / "rows.csv").write_text("id,text\n1,\n")
        given = {**options, "texts": tmp_path / options["texts"]} if "texts" in options else options
        with pytest.raises(InputFileError, match=message):
            check(CheckOptions(tiny_classifier, **given))

    def test_columns_of_pairs_are_two_names(self, tiny_classifier: Path) -> None:
        for flags in (["--pair-columns", "a,b"], ["--data", "rows.csv", "--pair-columns", "a"]):
            assert "--pair-columns" in run_check(tiny_classifier, *flags, code=ExitCode.USAGE).stderr


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


class Labels(BaseModel):
    names: tuple[str, ...]


class TestFigures:
    def test_macro_f1_counts_labels_alike(self) -> None:
        given, found = np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])
        assert macro_f1(given, found) == pytest.approx((4 / 5 + 2 / 3) / 2)

    def test_spearman_goes_by_ranks_and_shares_them_among_equals(self) -> None:
        assert spearman(np.array([1.0, 2.0, 30.0]), np.array([-5.0, 0.0, 1.0])) == pytest.approx(1.0)
        assert spearman(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(
            0.9486832980505138
        )

    def test_pairs_are_read_with_their_scores(self, tmp_path: Path) -> None:
        path = tmp_path / "pairs.csv"
        path.write_text("a,b,score\nmill,wheel,2.5\nmill,mill,5\n")
        assert read_pairs(path, ("a", "b"), "score") == ScoredPairs(
            "pairs.csv", ("mill", "mill"), ("wheel", "mill"), (2.5, 5.0)
        )
        path.write_text("a,b,score\nmill,wheel,much\n")
        with pytest.raises(InputFileError, match=r"line 2: 'score' is 'much'"):
            read_pairs(path, ("a", "b"), "score")

    def test_a_record_that_cannot_be_written_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        record = Labels(names=("flour",))
        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(InputFileError, match="No space left on device"):
            save_record(tmp_path / "record.json", record)
        assert list(tmp_path.iterdir()) == []

    def test_a_process_that_dies_is_told_from_one_that_answers(self) -> None:
        assert own_process.call(abs, -3) == 3
        for number, killed in ((signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGSEGV, False)):
            with pytest.raises(own_process.ProcessDiedError, match=number.name) as caught:
                own_process.call(signal.raise_signal, number)
            assert caught.value.killed is killed
        with pytest.raises(own_process.ProcessDiedError, match="exit code 3") as caught:
            own_process.call(os._exit, 3)
        assert not caught.value.killed
        with pytest.raises(ValueError, match="invalid literal"):
            own_process.call(int, "x")

    def test_a_process_ends_with_its_parent(self, tmp_path: Path) -> None:
        path = tmp_path / "pid"
        work = f"import os, time; open({str(path)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(600)"
        main = f"from gristmill_worker.models.check.own_process import call; call(exec, {work!r})"
        parent = subprocess.Popen([sys.executable, "-c", main])
        wait_until(lambda: path.exists() and path.read_text().endswith(" "))
        parent.kill()
        parent.wait()
        wait_until(lambda: not is_running(int(path.read_text())), timeout_s=20)

    def test_tensors_are_compared_relative_to_their_size_and_zeros_are_equal(self, tmp_path: Path) -> None:
        import_model(str(write_square(tmp_path / "source")), tmp_path / "model")
        answers = Answers(tmp_path / "model", manifests.load(tmp_path / "model"))
        ones, zeros = (np.full(3, value, np.float32) for value in (1.0, 0.0))
        assert answers.difference((ones * 20,), (ones * 10,)) == pytest.approx(1.0)
        assert answers.difference((zeros + np.float32(1e-9),), (zeros,)) < 1e-5
        assert answers.difference((ones,), (zeros,)) > 1

    def test_a_python_without_its_documentation_is_checked_with_sentences(
        self, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
        texts = list(documentation())
        assert len(texts) == len(set(texts)) > 16
        answers = Answers(tiny_encoder, manifests.load(tiny_encoder))
        items = check_items(answers, None, "text")
        assert items[0].length < items[-1].length == 48
        assert max(probe_items(answers, [7, 48])) == 48


class Wrapped:
    """An engine that counts its runs, and fails or answers wrongly at one sequence length."""

    def __init__(self, engine: Engine, wrong: int | None = None, failing: int | None = None) -> None:
        self.name, self.precision, self.shapes = engine.name, engine.precision, engine.shapes
        self.fixed = engine.shapes
        self.runs = 0
        self._engine, self._wrong, self._failing = engine, wrong, failing

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.runs += 1
        length = inputs["input_ids"].shape[1]
        if length == self._failing:
            raise EngineError("no")
        outputs = self._engine.run(inputs)
        # The first row alone is wrong: the mean over the batch would hide it.
        for array in outputs.values() if length == self._wrong else ():
            array[0] = np.roll(array[0], 1, axis=-1)
        return outputs

    def close(self) -> None:
        self._engine.close()


class TestSelfTest:
    shapes: Sequence[Shape] = default_shapes(48)
    runs = sum(1 + (batch == 1) for batch, _ in shapes)  # a batch of one runs with and without padding

    def wrapped(self, model: Path, form: str = "right", **faults: int) -> tuple[Wrapped, Variant]:
        variant = variant_of(model, form)
        return Wrapped(variant.load(self.shapes, 1), **faults), variant

    @pytest.fixture
    def model(self, tiny_encoder: Path, tmp_path: Path) -> Path:
        return copy_with_forms(tiny_encoder, tmp_path / "model", {"right": nothing})

    @pytest.mark.parametrize("length", [16, 32, 48])
    def test_one_wrong_row_at_one_length_is_found(self, model: Path, length: int) -> None:
        reference = reference_of(model, manifests.load(model))
        engine, variant = self.wrapped(model, wrong=length)
        found = self_test(engine, variant, reference, self.shapes, 1)
        wrong = {shape for shape, difference in found.items() if difference > 1e-3}
        assert wrong == {shape for shape in self.shapes if shape[1] == length}

    def test_a_worker_does_not_start_with_a_shape_that_is_wrong_or_fails(self, model: Path) -> None:
        manifest = manifests.load(model)
        engine, variant = self.wrapped(model, wrong=32)
        message = (
            r"wrongly in 6 of 18 shapes, worst in \d+x32 .*cosine -?0\.\d+, the least allowed is 0\.98\. "
        )
        with pytest.raises(ModelRefusedError, match=message):
            ensure_agreement(engine, variant, manifest, 1)
        engine, variant = self.wrapped(model, failing=16)
        with pytest.raises(ModelRefusedError, match="it fails, or answers NaN"):
            ensure_agreement(engine, variant, manifest, 1)
        assert list(model.glob("selftest-*")) == []

    def test_what_agreed_once_is_not_tried_again(self, model: Path) -> None:
        manifest = manifests.load(model)
        for runs in (self.runs, 0):
            engine, variant = self.wrapped(model)
            with capture_logs() as logs:
                ensure_agreement(engine, variant, manifest, 1)
            assert engine.runs == runs
            assert [entry["event"] for entry in logs] == ["self_test"] * bool(runs)

    @pytest.mark.parametrize("shapes", [[(1, 16), (1, 48)], [(4, 32)], [(1, 24)]])
    def test_an_engine_that_reads_padding_is_found_whatever_the_shapes(
        self, tiny_encoder: Path, tmp_path: Path, shapes: list[Shape]
    ) -> None:
        model = copy_with_forms(tiny_encoder, tmp_path / "model", {"padding": reading_padding})
        variant = variant_of(model, "padding")
        with closing(variant.load(shapes, 1)) as engine:
            found = self_test(engine, variant, reference_of(model, manifests.load(model)), shapes, 1)
            assert min(found.values()) > 1e-3
            with pytest.raises(ModelRefusedError, match="answers wrongly"):
                ensure_agreement(engine, variant, manifests.load(model), 1)

    def test_what_agreed_with_other_threads_or_kernels_is_tried(self, model: Path) -> None:
        variant, manifest = variant_of(model, "right"), manifests.load(model)

        def runs(threads: int, fixed: Sequence[Shape]) -> int:
            engine = Wrapped(variant.load(self.shapes, 1))
            engine.fixed = tuple(fixed)
            ensure_agreement(engine, variant, manifest, threads)
            return engine.runs

        assert runs(1, self.shapes) == self.runs
        assert runs(2, self.shapes) == self.runs
        assert runs(1, self.shapes[1:]) == 2  # one shape shares a compilation now
        assert runs(1, self.shapes[1:]) == runs(1, self.shapes) == runs(2, self.shapes) == 0

    def test_an_older_record_does_not_count_where_a_check_failed(self, model: Path) -> None:
        engine, variant = self.wrapped(model)
        ensure_agreement(engine, variant, manifests.load(model), 1)
        failed = Verdict(key=variant.run_key(), passed=False, problems=("x",), shapes=(), figures={})
        save_verdict(model, failed)
        engine, variant = self.wrapped(model, wrong=32)
        with pytest.raises(ModelRefusedError, match="answers wrongly"):
            ensure_agreement(engine, variant, manifests.load(model), 1)

    def test_what_cannot_be_stored_is_tried_every_time(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_arguments: object) -> None:
            raise InputFileError("Read-only file system")

        monkeypatch.setattr(self_testing, "save_record", refuse)
        for _ in range(2):
            engine, variant = self.wrapped(model)
            ensure_agreement(engine, variant, manifests.load(model), 1)
            assert engine.runs == self.runs

    def test_shapes_of_a_passed_check_are_not_tried_again(self, damaged: Checked, tmp_path: Path) -> None:
        model = Path(shutil.copytree(damaged[0], tmp_path / "model"))
        for threads, runs in ((1, 0), (2, self.runs)):
            engine, variant = self.wrapped(model)
            ensure_agreement(engine, variant, manifests.load(model), threads)
            assert engine.runs == runs

    def test_minilm_on_openvino_agrees_with_its_reference(self, minilm: Path) -> None:
        shapes = [(1, 16), (2, 32), (3, 40), (1, 256)]
        variant = variant_of(minilm, "fp32", "openvino")
        engine = variant.load(shapes, 1, memory_mb=100)  # fixed shapes and one for all the others
        found = self_test(engine, variant, reference_of(minilm, manifests.load(minilm)), shapes, 1)
        assert set(found) == set(shapes)
        assert max(found.values()) < 1e-6

    def test_one_compilation_for_all_shapes_is_tried_once_where_it_may_be_needed(self, model: Path) -> None:
        shapes = ((1, 16), (2, 48))
        batch = BatchSettings(shapes=shapes)
        settings = Settings(
            queue="q", model=model, engine="openvino", form="fp32", precision="fp32", batch=batch
        )

        def load(soon: bool | None) -> tuple[bool, int]:
            with capture_logs() as logs, closing((loaded := load_model(settings, soon=soon)).engine):
                assert len(own_shapes(loaded.engine)) == (2 if loaded.whole else 0)
                return loaded.whole, [entry["event"] for entry in logs].count("self_test")

        assert load(None) == (True, 1)
        assert load(True) == (True, 1)  # nothing is known of it yet
        assert load(True) == (False, 0)
        assert load(False) == load(None) == (True, 0)
        note_not_in_one(variant_of(model, "fp32", "openvino"), shapes, 1)
        assert load(True) == (True, 0)

    def test_the_reference_is_not_compared_with_itself(self, model: Path) -> None:
        engine, variant = self.wrapped(model, "fp32")
        ensure_agreement(engine, variant, manifests.load(model), 1)
        assert engine.runs == 0

    def test_the_worker_refuses_a_form_that_is_wrong_at_one_length(
        self, tiny_encoder: Path, workers: Workers, tmp_path: Path
    ) -> None:
        model = copy_with_forms(tiny_encoder, tmp_path / "model", {"length": wrong_at(32)})
        process = workers.start(model, "--engine", "onnxruntime", "--form", "length", ready=False)
        assert process.wait(timeout=120) == ExitCode.BAD_INPUT
        assert "answers wrongly in 6 of 18 shapes" in workers.log().read_text()

    def test_the_worker_serves_a_form_that_agrees_and_says_so(
        self, model: Path, workers: Workers, client: Client, queue: str
    ) -> None:
        workers.start(model, "--engine", "onnxruntime", "--form", "right")
        assert len(client.score(queue, "the mill")) == 32
        (line,) = (line for line in workers.log().read_text().splitlines() if '"self_test"' in line)
        assert json.loads(line)["worst_cosine"] > 1 - 1e-9
        assert json.loads(line)["shapes"] == len(self.shapes)
