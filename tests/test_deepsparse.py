"""DeepSparse: workers of its own environment, which ``make test`` makes beside this one; what is refused."""

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from conftest import Workers
from gristmill import Client
from gristmill.errors import ExitCode, InputFileError
from gristmill_worker.engines import deepsparse
from gristmill_worker.engines.base import EngineOptions
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.importer import import_model
from gristmill_worker.models.manifest import MODEL_FILE, digest_files
from gristmill_worker.models.quantize.run import Request, quantize

PYTHON = Path(f"{sys.prefix}-deepsparse", "bin", "python")
SHAPES = "batch: {shapes: [[1, 32], [4, 32], [1, 256]], max_wait_ms: 50}"
FORM = "int8-deepsparse"
TEXTS = [" ".join(text.split())[:600] for _, text in sorted(topics.items())[:24]] + ["one", "two words"]

needs_deepsparse = pytest.mark.skipif(
    not PYTHON.exists(), reason="'make test' makes the environment of DeepSparse with Python 3.11 on x86-64"
)


@pytest.fixture
def deepsparse_workers(workers: Workers) -> Workers:
    workers.python = str(PYTHON)
    return workers


@pytest.fixture(scope="session")
def quantized(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a form in static int8."""
    folder = tmp_path_factory.mktemp("quantized") / "model"
    import_model(str(minilm), folder)
    quantize(Request(folder, FORM))
    return folder


def embeddings(client: Client, queue: str) -> np.ndarray:
    values = [result.unwrap() for result in client.score_many(queue, [{"text": text} for text in TEXTS])]
    return np.asarray(values)  # (texts, hidden)


def reference(client: Client, workers: Workers, model: Path) -> np.ndarray:
    """Embeddings of a worker with onnxruntime in fp32, of this environment."""
    python, workers.python = workers.python, sys.executable
    worker = workers.start(model, "--engine", "onnxruntime", "--form", "fp32", config=SHAPES)
    values = embeddings(client, workers.queue)
    worker.terminate()
    assert worker.wait(60) == 0
    workers.python = python
    return values


def changed_model(source: Path, folder: Path) -> Path:
    """A model directory of the graph that stands in ``folder``, however broken: the digests fit."""
    manifest = manifests.load(source)
    for name in manifest.files:
        if not (folder / name).exists():
            (folder / name).write_bytes((source / name).read_bytes())
    manifest.model_copy(update={"files": digest_files(folder, manifest.files)}).write(folder)
    return folder


@needs_deepsparse
@pytest.mark.parametrize(("form", "least"), [("fp32", 0.999_999), (FORM, 0.98)])
def test_a_worker_of_another_environment_answers_as_the_reference_does(
    client: Client, deepsparse_workers: Workers, queue: str, quantized: Path, form: str, least: float
) -> None:
    workers = deepsparse_workers
    expected = reference(client, workers, quantized)
    worker = workers.start(quantized, "--engine", "deepsparse", "--form", form, config=SHAPES)
    found = embeddings(client, queue)
    assert (found * expected).sum(axis=1).min() > least
    alone = np.asarray(client.score(queue, TEXTS[-1]))
    np.testing.assert_allclose(found[-1], alone, atol=1e-6)  # whatever ran in the same batch
    worker.terminate()
    assert worker.wait(60) == 0
    manifests.load(quantized)  # no byte of any file was changed
    events = [json.loads(line) for line in workers.log(1).read_text().splitlines() if line.startswith("{")]
    assert [event["licence"] for event in events if event["event"] == "deepsparse_notice"] == [
        "Neural Magic DeepSparse Community License: for evaluation, not for production use"
    ]
    ready = next(event for event in events if event["event"] == "engine_ready")
    assert (ready["engine"], ready["precision"]) == ("deepsparse", form.removesuffix("-deepsparse"))


@needs_deepsparse
@pytest.mark.parametrize("kind", ["dynamic", "truncated", "newer"])
def test_a_model_that_it_cannot_run_is_refused_and_the_process_ends_in_order(
    deepsparse_workers: Workers, tiny_encoder: Path, tmp_path: Path, kind: str
) -> None:
    graph = (tiny_encoder / MODEL_FILE).read_bytes()
    if kind == "dynamic":  # the library would abort
        quantize_dynamic(tiny_encoder / MODEL_FILE, tmp_path / MODEL_FILE, weight_type=QuantType.QInt8)
    elif kind == "truncated":
        (tmp_path / MODEL_FILE).write_bytes(graph[: len(graph) // 2])
    else:
        (tmp_path / MODEL_FILE).write_bytes(b"\x08\x63" + graph[2:])  # the first field is the IR version
    model = changed_model(tiny_encoder, tmp_path)
    worker = deepsparse_workers.start(model, "--engine", "deepsparse", ready=False, config="threads: 1")
    assert worker.wait(60) == ExitCode.BAD_INPUT
    expected = {"dynamic": "DynamicQuantizeLinear", "truncated": "not an ONNX", "newer": "cannot run"}[kind]
    assert expected in deepsparse_workers.log().read_text()


PROBE = """
import sys
from pathlib import Path
import numpy as np
from gristmill.errors import GristmillError
from gristmill_worker.engines import deepsparse
from gristmill_worker.engines.base import EngineOptions, example_inputs
from gristmill_worker.models import manifest as manifests

directory = Path(sys.argv[1])
manifest = manifests.load(directory)

def show(call):
    try:
        print(call())
    except GristmillError as error:
        print(type(error).__name__, error)

engine = deepsparse.load(directory, manifest, [(2, 16), (2, 16), (1, 8)], EngineOptions())
batch = example_inputs(manifest.inputs, (2, 16))
print(engine.shapes)
show(lambda: engine.run({name: array[:1] for name, array in batch.items()}))
show(lambda: engine.run({name: array.astype(np.int32) for name, array in batch.items()}))
first = engine.run(batch)["last_hidden_state"]
kept = first.copy()
turned = {name: np.asfortranarray(array) for name, array in batch.items()}
again = engine.run(turned)["last_hidden_state"]
engine.run({**batch, "input_ids": batch["input_ids"] + 5})
engine.close()
print((first == kept).all() and (again == kept).all() and first is not again)
show(lambda: deepsparse.load(directory, manifest, [(1, 8), (1, 9)], EngineOptions(memory_mb=0)))
show(lambda: deepsparse.load(directory, manifest, [(1, 8)], EngineOptions(floats="bf16")))
raw = manifest.model_copy(update={"task": "tensors"})
show(lambda: deepsparse.load(directory, raw, [(1, 8)], EngineOptions()))
"""


@needs_deepsparse
def test_batches_of_other_shapes_and_too_many_shapes_are_refused(tiny_encoder: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-c", PROBE, tiny_encoder], check=True, capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stdout.splitlines() if "[warning" not in line]
    expected = [
        "((2, 16), (1, 8))",
        "EngineError inputs",
        "EngineError inputs",
        "True",
        "InputFileError deepsparse compiles each of 2 shapes, and 1 of them took 0 MiB",
        "InputFileError deepsparse computes floats in fp32 only",
        "ModelRefusedError deepsparse ends the whole process on an index beyond the end of a table",
    ]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


def test_what_is_in_the_way_is_known_before_the_library_is_imported(
    monkeypatch: pytest.MonkeyPatch, tiny_encoder: Path
) -> None:
    versions = {"deepsparse": "1.8.0", "numpy": "1.26.4", "onnx": "1.14.1"}
    features = {"avx2"}
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version_info", (3, 11, 7))
        patch.setattr(sys, "platform", "linux")
        patch.setattr(platform, "machine", lambda: "x86_64")
        patch.setattr(deepsparse, "cpu_features", lambda: frozenset(features))
        patch.setattr(deepsparse, "version", lambda name: versions[name])
        assert deepsparse.obstacle() is None
        patch.setenv("NM_ARCH", "avx512")
        assert "unset it" in str(deepsparse.obstacle())
        patch.delenv("NM_ARCH")
        versions["numpy"] = "2.0.1"
        assert "numpy < 2, this is 2.0.1" in str(deepsparse.obstacle())
        versions |= {"numpy": "1.26.4", "onnx": "1.15.0"}
        assert "onnx < 1.15, this is 1.15.0" in str(deepsparse.obstacle())
        versions["deepsparse"] = "1.9.0"
        assert "deepsparse is 1.9.0, only 1.8.0 runs" in str(deepsparse.obstacle())
        features.clear()
        assert "AVX2" in str(deepsparse.obstacle())
        patch.setattr(platform, "machine", lambda: "aarch64")
        assert "this is aarch64 linux" in str(deepsparse.obstacle())
        patch.setattr(sys, "version_info", (3, 12, 0))
        assert "needs Python 3.11, this is 3.12" in str(deepsparse.obstacle())
        with pytest.raises(InputFileError, match=r"3\.12: install it .*gristmill\[worker,deepsparse\]"):
            deepsparse.load(tiny_encoder, manifests.load(tiny_encoder), [(1, 8)], EngineOptions())


def test_a_missing_library_says_where_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(deepsparse, "version", missing)
    monkeypatch.setattr(deepsparse, "_obstacle_of_machine", lambda: None)
    assert "missing (deepsparse): install it in an environment with Python 3.11" in str(deepsparse.obstacle())
