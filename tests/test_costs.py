"""Costs: what was measured stays, gaps are filled sensibly, and another CPU's table is never used."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import InputFileError
from gristmill_worker.batching.cost_table import (
    CostKey,
    CostTable,
    Measurement,
    cost_key,
    costs_path,
    load_costs,
    save_costs,
)
from gristmill_worker.batching.costs import costs_for, fit, fit_error, formula
from gristmill_worker.batching.shapes import candidate_shapes
from gristmill_worker.cpus import cpu_model, describe_cpu
from gristmill_worker.engines.base import Shape
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.records import check_writable

GRID = candidate_shapes(256)
MEASURED = st.dictionaries(st.sampled_from(GRID), st.floats(1e-4, 10.0), min_size=1, max_size=20)
KEY = CostKey(cpu="a CPU", engine="mill", engine_version="1.0", precision="fp32", threads=1, model="abc")
UNWRITABLE = Path("/proc/self")  # for root, too


def seconds(shape: Shape) -> float:
    """A model of time that the fit knows the terms of: call, rows, tokens, attention."""
    batch, sequence = shape
    return 2e-3 + 1e-4 * batch + 5e-5 * batch * sequence + 1e-7 * batch * sequence**2


def table(key: CostKey = KEY) -> CostTable:
    entries = (Measurement(shape=s, seconds=seconds(s), runs=5) for s in ((1, 8), (1, 256), (8, 64), (64, 8)))
    return CostTable(key=key, measurements=tuple(entries))


class TestFit:
    def test_what_was_measured_stays_and_the_rest_is_said_to_be_fitted(self) -> None:
        measured = {shape: seconds(shape) for shape in GRID[::3]}
        costs = fit(measured, GRID)
        assert list(costs.seconds) == GRID
        assert costs.fitted == set(GRID) - set(measured)
        assert {shape: costs.seconds[shape] for shape in measured} == pytest.approx(measured)

    def test_gaps_follow_the_model(self) -> None:
        measured = {shape: seconds(shape) for shape in GRID[::7]}
        costs = fit(measured, GRID)
        for shape in GRID:
            assert costs.seconds[shape] == pytest.approx(seconds(shape), rel=1e-3)
        assert fit_error(measured) < 1e-3

    def test_a_measurement_draws_its_neighbours_with_it(self) -> None:
        slow, neighbours = (8, 64), ((8, 56), (8, 80))
        measured = {shape: seconds(shape) for shape in GRID[::5] if shape not in neighbours}
        even, drawn = fit(measured, GRID), fit(measured | {slow: 1.15 * seconds(slow)}, GRID)
        for neighbour in neighbours:
            assert drawn.seconds[neighbour] > 1.01 * even.seconds[neighbour]
        assert drawn.seconds[1, 256] == pytest.approx(even.seconds[1, 256], rel=0.03)

    @given(MEASURED)
    def test_costs_never_fall_where_a_shape_grows(self, measured: dict[Shape, float]) -> None:
        costs = fit(measured, GRID).seconds
        for batch, sequence in GRID:
            for larger in ((2 * batch, sequence), (batch, 2 * sequence)):
                if larger in costs:
                    assert costs[batch, sequence] <= costs[larger] * (1 + 1e-9)
        assert min(costs.values()) > 0

    def test_one_measurement_scales_the_formula(self) -> None:
        relative = formula(GRID)
        costs = fit({(4, 32): 0.5}, GRID).seconds
        assert costs[4, 32] == 0.5
        assert costs[1, 256] == pytest.approx(0.5 * relative[1, 256] / relative[4, 32])
        assert fit_error({(4, 32): 0.5}) == 0.0

    def test_two_measurements_that_contradict_each_other_are_averaged(self) -> None:
        costs = fit({(1, 8): 1.0, (1, 16): 3.0, (1, 24): 2.0, (1, 32): 4.0}, [(1, 16), (1, 24)])
        assert costs.seconds == {(1, 16): 2.5, (1, 24): 2.5}


class TestTable:
    def test_it_is_read_as_it_was_stored(self, tmp_path: Path) -> None:
        path = save_costs(tmp_path, table())
        assert path.parent == tmp_path
        assert path.name.startswith("costs-")
        assert load_costs(tmp_path, KEY) == table()
        assert save_costs(tmp_path, table()) == path
        assert list(tmp_path.iterdir()) == [path]
        assert path.stat().st_mode & 0o777 == 0o644

    @pytest.mark.parametrize("name", list(CostKey.model_fields))
    def test_any_difference_makes_it_another_table(self, tmp_path: Path, name: str) -> None:
        save_costs(tmp_path, table())
        other = KEY.model_copy(update={name: 2 if name == "threads" else "other"})
        assert load_costs(tmp_path, other) is None
        # Not even under its name.
        costs_path(tmp_path, KEY).rename(costs_path(tmp_path, other))
        assert load_costs(tmp_path, other) is None

    @pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"format": 2}', b"\xff"])
    def test_a_damaged_table_is_none(self, tmp_path: Path, content: bytes) -> None:
        costs_path(tmp_path, KEY).write_bytes(content)
        assert load_costs(tmp_path, KEY) is None
        assert costs_for(tmp_path, KEY, GRID) == (formula(GRID), "formula")

    def test_costs_come_from_the_table_or_else_the_formula(self, tmp_path: Path) -> None:
        assert costs_for(tmp_path / "missing", KEY, GRID) == (formula(GRID), "formula")
        save_costs(tmp_path, table())
        costs, origin = costs_for(tmp_path, KEY, GRID)
        assert origin == "measured"
        assert costs == fit(table().measured, GRID).seconds

    def test_a_directory_that_cannot_be_written_is_said_to_be_so(self) -> None:
        with pytest.raises(InputFileError, match="cannot be stored in /proc/self"):
            check_writable(UNWRITABLE)
        with pytest.raises(InputFileError, match="use a copy of the model"):
            save_costs(UNWRITABLE, table())


class TestKey:
    def test_it_holds_this_cpu_and_the_engines_version(self, tiny_encoder: Path) -> None:
        manifest = manifests.load(tiny_encoder)
        key = cost_key(Variant(tiny_encoder, "onnxruntime", "fp32", manifest), 2)
        assert key.cpu == cpu_model()
        assert key.engine_version[0].isdigit()
        assert (key.precision, key.threads, key.model) == ("fp32", 2, manifest.digest)
        other = Variant(tiny_encoder, "no such engine", "fp32", manifest, "bf16")
        assert other.run_key().engine_version == "unknown"
        assert other.run_key().precision == "bf16"

    def test_a_cpu_is_its_name_its_numbers_and_what_engines_look_for(self) -> None:
        intel = (
            "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Intel(R) Xeon(R) Platinum 8581C\n"
            "stepping\t: 2\nflags\t\t: fpu avx2 avx512f avx512_vnni amx_bf16\n\nprocessor\t: 1\n"
        )
        assert describe_cpu(intel) == (
            "Intel(R) Xeon(R) Platinum 8581C 6/207/2 avx2 avx512f avx512_vnni amx_bf16"
        )
        hidden = intel.replace(" amx_bf16", "")
        assert describe_cpu(hidden) != describe_cpu(intel)

    def test_a_cpu_without_a_name_is_told_by_its_part(self) -> None:
        arm = "processor: 0\nFeatures: fp asimd sve bf16\nCPU implementer: 0x41\nCPU part: 0xd40\n"
        assert describe_cpu(arm) == "0x41 0xd40 asimd sve bf16"
        assert describe_cpu("")
