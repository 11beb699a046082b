"""Where a worker's shapes and costs come from."""

import json
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from conftest import Workers
from gristmill import Client
from gristmill.errors import InputFileError
from gristmill_worker.batching import costs as costs_module
from gristmill_worker.batching import sizing as sizing_module
from gristmill_worker.batching.cost_table import (
    CostKey,
    CostTable,
    Measurement,
    cost_key,
    load_costs,
    save_costs,
)
from gristmill_worker.batching.sizing import Sizing
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.settings import BatchSettings, Settings

SHAPES = ((1, 16), (8, 16), (1, 48))


def tuned(model: Path, folder: Path) -> Path:
    """Return a copy of ``model`` with costs as ``tune`` stores them: a second a token, no cost of a call."""
    copy = folder / "model"
    shutil.copytree(model, copy)
    manifest = manifests.load(copy)
    measurements = tuple(Measurement(shape=shape, seconds=shape[0] * shape[1], runs=3) for shape in SHAPES)
    key = cost_key(Variant(copy, "onnxruntime", "fp32", manifest), 1)
    save_costs(copy, CostTable(key=key, measurements=measurements, shapes=SHAPES))
    return copy


def sizing(model: Path, **batch: object) -> Sizing:
    settings = Settings(queue="q", model=model, batch=BatchSettings.model_validate(batch))
    return Sizing.of(settings, Variant(model, "onnxruntime", "fp32", manifests.load(model)))


def test_settings_go_before_what_tune_chose_before_the_grid(tiny_classifier: Path, tmp_path: Path) -> None:
    model = tuned(tiny_classifier, tmp_path)
    assert list(sizing(model, shapes=[[2, 48]]).shapes) == [(2, 48)]
    assert set(sizing(model).shapes) == set(SHAPES)
    assert sizing(model).measured
    grid = sizing(tiny_classifier)
    assert len(grid.shapes) > len(SHAPES)
    assert not grid.measured
    with pytest.raises(InputFileError, match=r"\[1, 48\]"):
        sizing(model, shapes=[[2, 16]])


def test_an_engine_to_which_every_shape_is_dear_gets_few(tiny_encoder: Path) -> None:
    settings = Settings(queue="q", model=tiny_encoder)
    manifest = manifests.load(tiny_encoder)
    few = Sizing.of(settings, Variant(tiny_encoder, "deepsparse", "fp32", manifest)).shapes
    assert list(few) == [(1, 16), (8, 16), (1, 48), (8, 48)]


def test_the_table_is_read_once(
    tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tuned(tiny_classifier, tmp_path)
    read: list[Path] = []

    def load(folder: Path, key: CostKey) -> CostTable | None:
        read.append(folder)
        return load_costs(folder, key)

    for module in (sizing_module, costs_module):
        monkeypatch.setattr(module, "load_costs", load)
    assert sizing(model).measured
    assert read == [model]


@pytest.mark.parametrize("shapes", [[[1, 8], [4, 16]], [[1, 48], [2000, 48]], [[1, 512]]])
def test_stored_shapes_that_do_not_fit_are_not_used(
    tiny_classifier: Path, tmp_path: Path, shapes: list[list[int]]
) -> None:
    model = tuned(tiny_classifier, tmp_path)
    (path,) = model.glob("costs-*.json")
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "shapes": shapes}), "utf-8")
    assert list(sizing(model).shapes) == list(sizing(tiny_classifier).shapes)
    assert sizing(model).measured


@pytest.mark.parametrize(
    "measurement",
    [
        {"shape": [1, 16], "seconds": 1e308, "runs": 1},
        {"shape": [1, 16], "seconds": 1e-323, "runs": 1},
        {"shape": [1, 10**400], "seconds": 1.0, "runs": 1},
    ],
)
def test_senseless_costs_are_as_if_there_were_none(
    tiny_classifier: Path, tmp_path: Path, measurement: dict[str, object]
) -> None:
    model = tuned(tiny_classifier, tmp_path)
    (path,) = model.glob("costs-*.json")
    table = json.loads(path.read_text("utf-8"))
    table["measurements"].append(measurement)
    path.write_text(json.dumps(table), "utf-8")
    assert not sizing(model).measured


def test_a_worker_uses_what_tune_stored(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path, tmp_path: Path
) -> None:
    workers.start(tuned(tiny_classifier, tmp_path), "--engine", "onnxruntime")
    ready = json.loads(workers.log().read_text().splitlines()[2])
    assert (ready["event"], ready["shapes"], ready["costs"]) == ("engine_ready", 3, "measured")
    results = client.score_many(queue, ["bread"] * 20)
    shapes = {tuple(result.batch["shape"]) for result in results if result.batch}
    assert shapes <= set(SHAPES)


def test_a_worker_says_when_other_shapes_would_save_a_tenth(
    tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing_module, "ADVISE_EVERY_S", -1.0)
    model = tuned(tiny_classifier, tmp_path)
    with capture_logs() as logs:
        for made in (sizing(model), sizing(tiny_classifier)):
            made.lengths.add([30] * 5000)  # all of them padded to 48
            made.advise()
    (advice,) = logs  # without measured costs there is none
    assert advice["event"] == "other_shapes_are_better"
    assert advice["saving"] >= 0.1
    with capture_logs() as logs:
        made = sizing(model, shapes=advice["shapes"])
        made.lengths.add([30] * 5000)
        made.advise()
    assert logs == []
