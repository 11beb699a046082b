"""``gristmill-worker tune`` on a real engine, and the arithmetic of its measurements and its advice."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from click.testing import CliRunner, Result

from gristmill.errors import InputFileError
from gristmill_worker.batching.cost_table import cost_key, load_costs
from gristmill_worker.batching.costs import costs_for, formula, measured_speed
from gristmill_worker.batching.shapes import candidate_shapes, check_shapes, window_costs
from gristmill_worker.engines.base import Engine, EngineError, EngineOptions, Shape, engine_loader
from gristmill_worker.engines.choice import ANY, Wanted, choose
from gristmill_worker.models import manifest as manifests
from gristmill_worker.settings import Settings
from gristmill_worker.tune import report as tune_report
from gristmill_worker.tune.advice import Advisor
from gristmill_worker.tune.cli import tune
from gristmill_worker.tune.compare import Compilations
from gristmill_worker.tune.measure import (
    Run,
    ThreadRow,
    Timings,
    bound,
    compare_threads,
    informative_order,
    measure,
)
from gristmill_worker.tune.run import TuneOptions, text_lengths
from gristmill_worker.tune.run import tune as run_tune

PNG = b"\x89PNG\r\n\x1a\n"
CORES = tuple(sorted(os.sched_getaffinity(0)))


@pytest.fixture
def model(tiny_classifier: Path, tmp_path: Path) -> Path:
    """A copy of the tiny classifier to store tables in."""
    return Path(shutil.copytree(tiny_classifier, tmp_path / "model"))


def tuned(*arguments: object) -> Result:
    return CliRunner().invoke(tune, [str(argument) for argument in arguments], catch_exceptions=False)


def snippets(output: str) -> list[dict[str, Any]]:
    """Return the YAML that the command printed."""
    found: list[dict[str, Any]] = [
        yaml.safe_load(part) for part in output.split("\n# for ")[1:] for part in [part.split("\n", 1)[1]]
    ]
    return found


class TestCommand:
    def test_it_stores_costs_and_prints_settings_that_a_worker_takes(
        self, model: Path, tmp_path: Path
    ) -> None:
        png, figures = tmp_path / "costs.png", tmp_path / "costs.json"
        files = ["--png", png, "--json", figures]
        done = tuned(model, "--seconds", 1, "--cores", CORES[0], "--latency-ms", 50, *files)
        assert done.exit_code == 0
        for said in ("change of shape", "µs per token", "For throughput: 1 worker of 1 thread(s)"):
            assert said in done.output
        manifest = manifests.load(model)  # the table is no part of the model
        fast, quick = snippets(done.output)
        for snippet in (fast, quick):
            settings = Settings.model_validate({"queue": "q", "model": str(model), **snippet})
            assert settings.batch.shapes is not None
            assert check_shapes(settings.batch.shapes, manifest.max_length) == sorted(settings.batch.shapes)
            assert len(settings.batch.shapes) <= 32
        assert quick["batch"]["max_wait_ms"] == 0

        variant = choose(model, manifest, Wanted(fast["engine"], fast["form"], fast["precision"])).variant
        key = cost_key(variant, 1)
        table = load_costs(model, key)
        assert table is not None
        costs, origin = costs_for(model, key, [tuple(shape) for shape in fast["batch"]["shapes"]])
        assert origin == "measured"
        assert all(seconds > 0 for seconds in costs.values())

        assert png.read_bytes().startswith(PNG)
        data = json.loads(figures.read_bytes())
        assert data["key"] == key.model_dump()
        measured = {tuple(entry["shape"]) for entry in data["costs"] if not entry["fitted"]}
        assert measured == set(table.measured)
        assert {tuple(entry["shape"]) for entry in data["costs"]} == set(
            candidate_shapes(manifest.max_length)
        )
        assert data["recommendations"][0]["max_items"] == fast["batch"]["max_items"]
        assert 0 < data["efficiency"]["default"] <= 1
        assert all(0 < share <= 1 for share in data["efficiency"]["by_count"].values())
        assert data["threads"] == []

    def test_it_compares_what_can_run_here_and_auto_takes_the_fastest(
        self, model: Path, tmp_path: Path
    ) -> None:
        figures = tmp_path / "costs.json"
        done = tuned(model, "--seconds", 1, "--cores", CORES[0], "--json", figures)
        assert done.exit_code == 0
        rows = json.loads(figures.read_bytes())["compared"]
        found = [(row["engine"], row["form"], row["precision"]) for row in rows]
        assert {("onnxruntime", "fp32", "fp32"), ("openvino", "fp32", "fp32")} <= set(found)
        assert all(row["doubt"] is None for row in rows)
        assert all(rate > 0 for row in rows for _, rate in row["texts_per_s"])
        # Everything was stored, so a worker goes by measurements alone.
        manifest = manifests.load(model)
        choice = choose(model, manifest, ANY, measured=partial(measured_speed, threads=1))
        assert choice.reason == f"the fastest of {len(rows)} that were measured on this CPU"
        assert len(list(model.glob("costs-*.json"))) == len(rows)
        # With one of them there is nothing to compare.
        done = tuned(model, "--seconds", 1, "--cores", CORES[0], "--json", figures, "--engine", "onnxruntime")
        assert json.loads(figures.read_bytes())["compared"] == []
        assert json.loads(figures.read_bytes())["compilations"] is None
        (fast,) = snippets(done.output)
        assert fast["engine"] == "onnxruntime"
        assert "engine_memory_mb" not in fast

    def test_it_compares_compilations_of_single_shapes_with_one_for_all(
        self, model: Path, tmp_path: Path
    ) -> None:
        figures = tmp_path / "costs.json"
        flags = ("--engine", "openvino", "--precision", "fp32")
        done = tuned(model, "--seconds", 1, "--cores", CORES[0], "--json", figures, *flags)
        compilations = json.loads(figures.read_bytes())["compilations"]
        assert len(compilations["gains"]) == 3
        assert compilations["mb_per_shape"] >= 0
        assert snippets(done.output)[0]["engine_memory_mb"] % 64 == 0

    def test_it_compares_threads_where_there_are_cores(self, model: Path, tmp_path: Path) -> None:
        figures = tmp_path / "costs.json"
        done = tuned(model, "--seconds", 1, "--max-shapes", 3, "--json", figures)
        assert done.exit_code == 0
        data = json.loads(figures.read_bytes())
        assert data["cores"] == list(CORES)
        assert (len(data["threads"]) > 0) is (len(CORES) > 1)
        assert len(snippets(done.output)[0]["batch"]["shapes"]) <= 3
        assert set(os.sched_getaffinity(0)) == set(CORES)

    def test_it_takes_lengths_from_a_file(self, model: Path, tmp_path: Path) -> None:
        path = tmp_path / "texts.csv"
        path.write_text("id,body\n" + "1,the mill\n2,\n3,the mill grinds the corn\n4, \n")
        options = TuneOptions(model=model, texts=path, text_column="body")
        lengths, skipped = text_lengths(options, manifests.load(model))
        assert len(lengths) == 4096
        assert len(set(lengths)) == 2
        assert skipped == 2
        with pytest.raises(InputFileError, match="no text in the column 'text'"):
            text_lengths(TuneOptions(model=model, texts=path), manifests.load(model))
        with pytest.raises(InputFileError, match=r"has to end in one of \.csv"):
            text_lengths(TuneOptions(model=model, texts=tmp_path / "texts.doc"), manifests.load(model))

    def test_it_says_how_many_rows_have_no_text(self, model: Path, tmp_path: Path) -> None:
        path = tmp_path / "texts.csv"
        path.write_text('text\nthe mill\n""\nthe mill grinds\n" "\n')
        path_json = tmp_path / "tune.json"
        done = tuned(model, "--cores", CORES[0], "--seconds", 1, "--texts", path, "--json", path_json)
        assert done.exit_code == 0, done.output
        assert "2 rows without a text" in done.output
        assert json.loads(path_json.read_text("utf-8"))["texts"]["skipped_rows"] == 2

    def test_it_takes_pythons_documentation_by_default(self, model: Path) -> None:
        manifest = manifests.load(model)
        lengths, skipped = text_lengths(TuneOptions(model=model), manifest)
        assert (lengths, skipped) == text_lengths(TuneOptions(model=model), manifest)
        assert skipped == 0
        assert len(set(lengths)) > 10
        assert max(lengths) == manifest.max_length

    def test_what_cannot_be_tuned_is_refused_before_measuring(self, model: Path) -> None:
        with pytest.raises(InputFileError, match=r"gristmill\.json is missing"):
            tuned(model.parent)
        with pytest.raises(InputFileError, match="engine 'steam' is unknown"):
            tuned(model, "--engine", "steam")
        with pytest.raises(InputFileError, match="threads need as many cores"):
            tuned(model, "--threads", len(CORES) + 1)
        with pytest.raises(InputFileError, match=r"the cores \[4095\] cannot be used"):
            tuned(model, "--cores", 4095)
        assert tuned(model, "--cores", "a-b").exit_code == 2

    def test_a_directory_that_cannot_be_written_is_refused_before_measuring(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_arguments: object, **_options: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
        with pytest.raises(InputFileError, match="Read-only file system"):
            run_tune(TuneOptions(model=model), say=pytest.fail)

    def test_a_missing_package_for_the_png_is_named_before_measuring(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tune_report, "find_spec", lambda _name: None)
        with pytest.raises(InputFileError, match=r"gristmill\[tune\]"):
            tuned(model, "--png", "costs.png")

    def test_models_of_tensors_are_refused(self, model: Path) -> None:
        manifest = manifests.load(model).model_copy(update={"task": "tensors"})
        with pytest.raises(InputFileError, match="only models that take text"):
            text_lengths(TuneOptions(model=model), manifest)


class TestMeasuring:
    def opener(self, model: Path, loaded: list[list[Shape]]) -> Any:
        manifest = manifests.load(model)

        def open_engine(threads: int, shapes: Sequence[Shape]) -> Engine:
            loaded.append(list(shapes))
            return engine_loader("onnxruntime")(model, manifest, shapes, EngineOptions(threads))

        return open_engine

    def test_every_shape_is_seen_once_before_one_is_seen_twice(self, tiny_encoder: Path) -> None:
        inputs = manifests.load(tiny_encoder).inputs
        candidates = candidate_shapes(48)
        loaded: list[list[Shape]] = []
        timings = measure(
            self.opener(tiny_encoder, loaded), inputs, candidates, threads=1, seconds=2, say=lambda _: None
        )
        assert timings.passes >= 1
        first: list[Shape] = []
        for group in loaded:
            if set(group) & set(first):
                break
            first += group
        assert set(first) == set(timings.switched) == set(timings.steady) == set(timings.seconds())
        assert set(first) <= set(candidates)
        for shape in first:
            assert timings.runs(shape) >= 2 * timings.passes
        assert timings.switching(alone=True) is not None
        assert timings.switching(alone=False) is not None

    def test_too_little_time_still_measures_a_few_shapes(self, tiny_encoder: Path) -> None:
        inputs = manifests.load(tiny_encoder).inputs
        timings = measure(
            self.opener(tiny_encoder, []),
            inputs,
            candidate_shapes(48),
            threads=1,
            seconds=1e-6,
            say=lambda _: None,
        )
        assert len(timings.seconds()) == 6
        assert timings.passes == 1

    def test_engines_and_threads_are_compared_on_the_same_cores(self, tiny_encoder: Path) -> None:
        inputs = manifests.load(tiny_encoder).inputs
        loaded: list[list[Shape]] = []
        shapes = [(1, 8), (8, 8)]
        rows = compare_threads(
            self.opener(tiny_encoder, loaded), inputs, shapes, CORES, seconds=0.1, say=lambda _: None
        )
        assert [row.shape for row in rows] == shapes
        assert loaded == [shapes] * (len(CORES) + 1)
        for row in rows:
            assert row.singles_per_s == pytest.approx(len(CORES) * row.shape[0] / row.single_s)
            assert row.wide_per_s == pytest.approx(row.shape[0] / row.wide_s)

    def test_an_engine_that_fails_is_closed_and_the_affinity_restored(self, tiny_encoder: Path) -> None:
        closed = []

        class Broken:
            def run(self, _inputs: object) -> None:
                raise EngineError("broken")

            def close(self) -> None:
                closed.append(True)

        with pytest.raises(EngineError, match="broken"), bound(CORES[:1]):
            measure(
                lambda _threads, _shapes: Broken(),  # type: ignore[arg-type,return-value]
                manifests.load(tiny_encoder).inputs,
                candidate_shapes(48),
                threads=1,
                seconds=1,
                say=lambda _: None,
            )
        assert closed == [True]
        assert tuple(sorted(os.sched_getaffinity(0))) == CORES

    def test_shapes_go_from_coarse_to_fine(self) -> None:
        shapes = [(batch, sequence) for batch in (1, 2, 4) for sequence in (8, 16, 24, 32, 40)]
        order = informative_order(shapes)
        assert sorted(order) == sorted(shapes)
        assert set(order[:4]) == {(1, 8), (1, 40), (4, 8), (4, 40)}
        assert set(order[:9]) == {(batch, sequence) for batch in (1, 2, 4) for sequence in (8, 24, 40)}
        assert informative_order([(1, 8)]) == [(1, 8)]


def runs(*pairs: tuple[float, float]) -> list[Run]:
    return [Run(seconds, cpu_s) for seconds, cpu_s in pairs]


class TestTimings:
    quiet = runs((1.0, 1.0), (1.2, 1.2), (1.1, 1.1))

    def test_runs_that_had_to_share_the_core_do_not_count(self) -> None:
        disturbed = [*self.quiet, *runs((2.4, 1.2), (9.0, 1.3), (3.0, 1.1), (2.0, 1.0))]
        timings = Timings({(1, 8): disturbed}, {(1, 8): self.quiet})
        assert timings.seconds() == {(1, 8): 1.1}

    def test_if_all_runs_had_to_share_their_cpu_time_tells(self) -> None:
        quiet = {(1, 8): self.quiet, (1, 16): self.quiet}
        busy = {(1, 24): runs((2.0, 1.5), (4.0, 1.7))}
        timings = Timings(quiet | busy, quiet | busy)
        assert timings.seconds()[1, 24] == pytest.approx(1.6)

    def test_a_change_of_shape_is_told_apart_for_batches_of_one(self) -> None:
        switched = {(1, 8): runs((1.5, 1.5)), (8, 8): runs((4.4, 4.4))}
        steady = {(1, 8): runs((1.0, 1.0)), (8, 8): runs((4.0, 4.0))}
        timings = Timings(switched, steady)
        assert timings.switching(alone=True) == pytest.approx(0.5)
        assert timings.switching(alone=False) == pytest.approx(0.1)
        assert Timings({(1, 8): self.quiet}, {(1, 8): self.quiet}).switching(alone=False) is None
        # Where it is dear, a worker meets that cost.
        assert timings.seconds() == {(1, 8): 1.5, (8, 8): 4.4}

    def test_runs_in_a_row_count_where_a_change_of_shape_is_cheap(self) -> None:
        timings = Timings({(1, 8): runs((1.0, 1.0))}, {(1, 8): runs((0.98, 0.98))})
        assert timings.seconds() == {(1, 8): pytest.approx(0.99)}


class TestAdvice:
    lengths = [8, 12, 16, 30] * 128
    shapes = candidate_shapes(32)
    costs: ClassVar = {shape: cost * 1e-4 for shape, cost in formula(shapes).items()}  # 3.2 ms and up

    def advisor(self, max_shapes: int = 16) -> Advisor:
        return Advisor(self.lengths, self.costs, 32, max_shapes)

    def row(self, singles_per_s: float, wide_per_s: float) -> ThreadRow:
        return ThreadRow((1, 16), 4 / singles_per_s, 1 / wide_per_s, singles_per_s, wide_per_s)

    def test_the_fewest_shapes_that_are_nearly_as_good_are_taken(self) -> None:
        advisor = self.advisor()
        sets = advisor.by_count()
        assert list(sets) == sorted(sets)
        assert max(sets) <= 16
        chosen = advisor.fewest(sets)
        best = max(advisor.efficiency(shapes) for shapes in sets.values())
        assert 0.97 * best <= advisor.efficiency(chosen) <= best <= 1.0

    def test_for_throughput_one_thread_on_each_core_unless_threads_win_clearly(self) -> None:
        shapes = self.advisor().choose(256, 4)
        for rows, threads, note in (
            ([], 1, False),
            ([self.row(100, 90)], 1, False),
            ([self.row(100, 101)], 1, False),
            ([self.row(100, 120)], 4, True),
        ):
            advice = self.advisor().for_throughput(shapes, 1, 4, rows)
            assert (advice.threads, advice.workers) == (threads, 4 // threads)
            assert bool(advice.note) is note
            assert advice.max_wait_ms is None
        measured_wide = self.advisor().for_throughput(shapes, 4, 4, [self.row(100, 90)])
        assert measured_wide.threads == 1
        assert "--threads 1" in measured_wide.note

    def test_for_a_latency_two_windows_fit_in(self) -> None:
        advice = self.advisor().for_latency(60, 1, 1, [])
        assert advice.note == ""
        assert 2 * advice.window_p95_ms <= 60
        larger = window_costs(self.lengths, advice.shapes, self.costs, advice.max_items * 2)
        assert 2000 * max(larger) > 60

    def test_a_latency_that_one_thread_misses_takes_all_cores(self) -> None:
        alone = self.advisor().for_latency(1e6, 1, 4, [self.row(400, 300)])
        assert (alone.threads, alone.workers) == (1, 4)
        wide = self.advisor().for_latency(6, 1, 4, [self.row(400, 300)])
        assert (wide.threads, wide.workers) == (4, 1)
        assert 2 * wide.window_p95_ms <= 6
        assert "--threads 4" in wide.note

    def test_a_latency_out_of_reach_is_said_to_be_so(self) -> None:
        advice = self.advisor().for_latency(0.1, 1, 4, [self.row(400, 300)])
        assert advice.note.startswith("NOT REACHED")
        assert advice.max_items == 1


@pytest.mark.parametrize(
    ("gain", "memory_mb"),
    [(0.01, 0), (0.2, 64 * 14)],  # 17 times 50 MiB, rounded up
)
def test_compilations_get_memory_where_they_gain(gain: float, memory_mb: int) -> None:
    compilations = Compilations({(1, 32): gain, (8, 32): gain, (4, 128): 9.0}, 50.0)
    assert compilations.memory_mb(16) == memory_mb
