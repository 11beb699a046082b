"""Every engine answers as the reference does, whatever the shape, and says what it cannot run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from gristmill.errors import InputFileError
from gristmill_worker.cpus import cpu_features
from gristmill_worker.engines.base import (
    Array,
    Engine,
    EngineError,
    EngineOptions,
    Floats,
    Shape,
    engine_loader,
    example_inputs,
    may_pass,
)
from gristmill_worker.engines.choice import NATIVE_BF16
from gristmill_worker.engines.openvino import OpenVinoEngine
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.manifest import Manifest, ModelRefusedError

SHAPES: list[Shape] = [(1, 8), (4, 8), (3, 16), (1, 48), (8, 48)]
DYNAMIC = 0  # MB for compilations of single shapes


@dataclass(frozen=True)
class Case:
    """An engine and how it is loaded; ``tolerance`` is of outputs that are around 1."""

    engine: str
    options: EngineOptions
    tolerance: float

    def load(self, model: Path, manifest: Manifest, shapes: list[Shape]) -> Engine:
        return engine_loader(self.engine)(model, manifest, shapes, self.options)


CASES = {
    "onnxruntime": Case("onnxruntime", EngineOptions(), 1e-5),
    "openvino": Case("openvino", EngineOptions(), 1e-5),
    "openvino-dynamic": Case("openvino", EngineOptions(memory_mb=DYNAMIC), 1e-5),
    "openvino-two-threads": Case("openvino", EngineOptions(threads=2), 1e-5),
}
if cpu_features() & NATIVE_BF16:
    CASES["openvino-bf16"] = Case("openvino", EngineOptions(floats="bf16"), 0.05)


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def engine(case: Case, tiny_encoder: Path) -> Iterator[Engine]:
    with closing(case.load(tiny_encoder, manifests.load(tiny_encoder), SHAPES)) as loaded:
        yield loaded


def some_inputs(shape: Shape, seed: int = 0) -> dict[str, Array]:
    """Texts of random tokens and lengths, padded to ``shape``."""
    rng = np.random.default_rng(seed)
    batch, sequence = shape
    lengths = rng.integers(1, sequence + 1, batch)
    mask = (np.arange(sequence) < lengths[:, None]).astype(np.int64)  # (batch, sequence)
    ids = rng.integers(1, 20, shape) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def attended(outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> Array:
    """States of real tokens, (tokens, hidden)."""
    states: Array = outputs["last_hidden_state"][inputs["attention_mask"] == 1]
    return states


def test_it_agrees_with_the_reference_at_every_shape(case: Case, engine: Engine, tiny_encoder: Path) -> None:
    manifest = manifests.load(tiny_encoder)
    reference = CASES["onnxruntime"].load(tiny_encoder, manifest, SHAPES)
    for turn in range(3):  # from shape to shape, and again
        for shape in SHAPES:
            inputs = some_inputs(shape, turn)
            expected = attended(reference.run(inputs), inputs)
            found = attended(engine.run(inputs), inputs)
            assert found.dtype == expected.dtype == np.float32
            assert np.abs(found - expected).max() <= case.tolerance


def test_a_text_is_answered_the_same_in_any_company(case: Case, engine: Engine) -> None:
    alone = some_inputs((1, 48), 5)
    expected = attended(engine.run(alone), alone)
    for place in (0, 7):
        crowd = some_inputs((8, 48), 6)
        for name, row in alone.items():
            crowd[name][place] = row[0]
        found = engine.run(crowd)["last_hidden_state"][place][alone["attention_mask"][0] == 1]
        assert np.abs(found - expected).max() <= case.tolerance


def test_the_same_batch_twice_is_answered_bit_by_bit_the_same(engine: Engine) -> None:
    inputs = some_inputs((8, 48))
    first, second = (engine.run(inputs)["last_hidden_state"] for _ in range(2))
    assert np.array_equal(first, second)


def test_outputs_belong_to_the_caller(engine: Engine) -> None:
    output = engine.run(some_inputs((3, 16), 1))["last_hidden_state"]
    copy = output.copy()
    engine.run(some_inputs((3, 16), 2))
    assert np.array_equal(output, copy)


def test_arrays_that_are_parts_of_others_are_read_as_they_are(engine: Engine) -> None:
    inputs = some_inputs((4, 8), 3)
    expected = engine.run(inputs)["last_hidden_state"]
    views = {name: np.repeat(array, 2, axis=1)[:, ::2] for name, array in inputs.items()}
    assert not views["input_ids"].flags.c_contiguous
    assert np.array_equal(engine.run(views)["last_hidden_state"], expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: {name: array[:2] for name, array in inputs.items()},
        lambda inputs: {name: array[:, :5] for name, array in inputs.items()},
        lambda inputs: {name: array.astype(np.int32) for name, array in inputs.items()},
        lambda inputs: {name: array.astype(np.float64) for name, array in inputs.items()},
        lambda inputs: {**inputs, "attention_mask": inputs["attention_mask"][:1]},
    ],
)
def test_a_batch_that_it_was_not_loaded_for_is_refused_and_the_next_one_runs(
    engine: Engine, change: Any
) -> None:
    inputs = some_inputs((3, 16))
    with pytest.raises(EngineError, match="no shape"):
        engine.run(change(inputs))
    assert np.isfinite(engine.run(inputs)["last_hidden_state"]).all()


def test_it_says_what_it_loaded(case: Case, engine: Engine) -> None:
    assert engine.name == case.engine
    assert engine.precision == case.options.floats
    assert engine.shapes == tuple(SHAPES)


def test_memory_decides_which_shapes_have_a_compilation_of_their_own(minilm: Path) -> None:
    manifest = manifests.load(minilm)
    shapes: list[Shape] = [(1, 16), (1, 32), (2, 16), (2, 32)]
    found = {}
    for memory_mb in (0, 1, 4096):
        with closing(
            engine_loader("openvino")(minilm, manifest, shapes, EngineOptions(1, "fp32", memory_mb))
        ) as one:
            assert isinstance(one, OpenVinoEngine)
            found[memory_mb] = one.fixed
            assert one.shapes == tuple(shapes)
    assert found == {0: (), 1: ((1, 16),), 4096: tuple(shapes)}


def test_compilations_are_kept_in_the_folder_given(tiny_encoder: Path, tmp_path: Path) -> None:
    options = EngineOptions(cache_dir=tmp_path / "cache")
    manifest = manifests.load(tiny_encoder)
    for _ in range(2):
        engine_loader("openvino")(tiny_encoder, manifest, [(1, 8)], options).close()
        assert list((tmp_path / "cache").iterdir())


class TestRefusals:
    @pytest.fixture
    def model(self, tiny_encoder: Path, tmp_path: Path) -> Path:
        shutil.copytree(tiny_encoder, tmp_path / "model")
        return tmp_path / "model"

    def refusal(self, case: Case, model: Path, manifest: Manifest) -> str:
        with pytest.raises(ModelRefusedError) as caught:
            case.load(model, manifest, SHAPES)
        return str(caught.value)

    def test_a_file_that_is_no_model(self, case: Case, model: Path) -> None:
        manifest = manifests.load(model)
        for content in (b"", b"no graph", (model / "model.onnx").read_bytes()[:2000]):
            (model / "model.onnx").write_bytes(content)
            assert f"cannot run {model / 'model.onnx'}" in self.refusal(case, model, manifest)

    def test_a_missing_file(self, case: Case, model: Path) -> None:
        manifest = manifests.load(model)
        (model / "model.onnx").unlink()
        assert "cannot run" in self.refusal(case, model, manifest)

    def test_an_operator_that_nobody_knows(self, case: Case, model: Path) -> None:
        manifest = manifests.load(model)
        graph = onnx.load(model / "model.onnx")
        graph.graph.node[0].op_type = "GrindCoarsely"
        onnx.save(graph, model / "model.onnx")
        assert "GrindCoarsely" in self.refusal(case, model, manifest)

    def test_an_opset_of_the_future(self, model: Path) -> None:
        # OpenVINO takes it for the newest that it knows: that `model import` runs what it imports in
        # onnxruntime is what keeps such a model out.
        case = CASES["onnxruntime"]
        manifest = manifests.load(model)
        graph = onnx.load(model / "model.onnx")
        graph.opset_import[0].version = 99
        onnx.save(graph, model / "model.onnx")
        assert "99" in self.refusal(case, model, manifest)

    def test_names_that_the_graph_does_not_have(self, case: Case, model: Path) -> None:
        manifest = manifests.load(model)
        for field in ("inputs", "outputs"):
            tensors = getattr(manifest, field)
            renamed = (tensors[0].model_copy(update={"name": "flour"}), *tensors[1:])
            refusal = self.refusal(case, model, manifest.model_copy(update={field: renamed}))
            assert "has no 'flour'" in refusal


@pytest.mark.parametrize("floats", ["bf16"])
def test_floats_that_an_engine_does_not_compute_in_are_refused(tiny_encoder: Path, floats: Floats) -> None:
    with pytest.raises(InputFileError, match="fp32 only"):
        engine_loader("onnxruntime")(
            tiny_encoder, manifests.load(tiny_encoder), SHAPES, EngineOptions(floats=floats)
        )


TWO_THREADS = """
import os, sys
from pathlib import Path
from gristmill_worker.engines.base import EngineOptions, engine_loader, warm_up
from gristmill_worker.models import manifest as manifests

folder = Path(sys.argv[1])
manifest = manifests.load(folder)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
before = set(os.listdir("/proc/self/task"))
engine = engine_loader("openvino")(folder, manifest, [(1, 16), (8, 48)], EngineOptions(threads=2))
warm_up(engine, manifest.inputs)
started = set(os.listdir("/proc/self/task")) - before
print(len(started), {cpu for thread in started for cpu in os.sched_getaffinity(int(thread))})
"""


def test_threads_stay_on_the_cpus_that_the_process_was_given(tiny_encoder: Path) -> None:
    # In a process of its own: threads of earlier engines start others on CPUs of theirs.
    command = [sys.executable, "-c", TWO_THREADS, str(tiny_encoder)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(" ", 1)
    assert int(found[0]) > 0
    assert found[1].strip() == str({min(os.sched_getaffinity(0))})


def test_an_example_is_valid(tiny_encoder: Path) -> None:
    example = example_inputs(manifests.load(tiny_encoder).inputs, (2, 8))
    assert example["attention_mask"].all()


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_memory_that_lacks_is_an_error_that_may_pass_and_never_an_earlier_answer(
    name: str, minilm: Path
) -> None:
    program = Path(__file__).with_name("starved_engine.py")
    ran = subprocess.run([sys.executable, program, name, minilm], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["error"].startswith(f"{name} failed: ")
    assert found["retryable"] is True
    assert found["difference"] < 1e-4


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (MemoryError("Unable to allocate 3.00 MiB for an array"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not allocate a memory object"), True),
        (RuntimeError("Got invalid dimensions for input: ids"), False),
        (EngineError("bad_alloc, says one who knows better"), False),
    ],
)
def test_only_memory_may_pass(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
