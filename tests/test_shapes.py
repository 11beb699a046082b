"""Which shapes are chosen: against the planner, brute force, and what no exchange may improve."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_worker.batching.costs import formula
from gristmill_worker.batching.planner import Planner
from gristmill_worker.batching.shapes import (
    LengthCounter,
    better_shapes,
    candidate_shapes,
    choose_shapes,
    default_shapes,
    expected_cost,
    ideal_cost,
    window_costs,
)
from gristmill_worker.engines.base import Shape

GRID = [(batch, sequence) for batch in (1, 3) for sequence in (8, 16, 24, 32)]
LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=40)
GRID_COSTS = st.lists(st.floats(0.1, 10.0), min_size=len(GRID), max_size=len(GRID)).map(
    lambda prices: dict(zip(GRID, prices, strict=True))
)
SUBSETS = st.lists(st.sampled_from(GRID), max_size=5).map(lambda shapes: [*shapes, (1, 32)])


def planned(lengths: Sequence[int], shapes: Sequence[Shape], cost: dict[Shape, float], window: int) -> float:
    """Return the mean cost of a text by the planner itself."""
    planner = Planner(shapes, cost)
    windows = [lengths[at : at + window] for at in range(0, len(lengths), window)]
    return sum(cost[batch.shape] for part in windows for batch in planner.plan(part)) / len(lengths)


def log_normal(count: int, median: float, longest: int = 256) -> list[int]:
    rng = random.Random(5)
    return [min(longest, max(3, round(median * rng.lognormvariate(0, 0.7)))) for _ in range(count)]


@given(LENGTHS, SUBSETS, GRID_COSTS, st.integers(1, 50))
def test_the_expected_cost_is_that_of_the_plans(
    lengths: list[int], shapes: list[Shape], cost: dict[Shape, float], window: int
) -> None:
    expected = expected_cost(lengths, shapes, cost, window)
    assert expected == pytest.approx(planned(lengths, shapes, cost, window))
    assert window_costs(lengths, shapes, cost, window).sum() == pytest.approx(expected * len(lengths))


@given(LENGTHS, SUBSETS, GRID_COSTS, st.floats(0, 1))
def test_texts_that_find_the_worker_idle_run_alone(
    lengths: list[int], shapes: list[Shape], cost: dict[Shape, float], idle: float
) -> None:
    mixed = (1 - idle) * planned(lengths, shapes, cost, 8) + idle * planned(lengths, shapes, cost, 1)
    assert expected_cost(lengths, shapes, cost, 8, idle) == pytest.approx(mixed)


@settings(deadline=None)
@given(LENGTHS, GRID_COSTS, st.integers(1, 4))
def test_no_exchange_and_no_addition_improves_the_chosen_shapes(
    lengths: list[int], cost: dict[Shape, float], count: int
) -> None:
    chosen = choose_shapes(lengths, GRID, cost, max_length=32, max_count=count, window=8)
    assert 1 <= len(chosen) <= count
    assert chosen == sorted(set(chosen))
    assert max(sequence for _, sequence in chosen) == 32
    least = planned(lengths, chosen, cost, 8)
    others = [[*chosen[:at], *chosen[at + 1 :], shape] for at in range(len(chosen)) for shape in GRID]
    if len(chosen) < count:
        others += [[*chosen, shape] for shape in GRID]
    for other in others:
        if max(sequence for _, sequence in other) == 32:
            assert planned(lengths, other, cost, 8) >= least * (1 - 1e-5)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_chosen_shapes_are_nearly_as_good_as_those_of_brute_force(seed: int, count: int) -> None:
    rng = random.Random(seed)
    lengths = [min(32, max(1, round(rng.lognormvariate(2.3, 0.6)))) for _ in range(60)]
    cost = {shape: value * rng.uniform(0.9, 1.1) for shape, value in formula(GRID).items()}
    least = min(
        planned(lengths, shapes, cost, 16)
        for shapes in combinations(GRID, count)
        if max(sequence for _, sequence in shapes) == 32
    )
    chosen = choose_shapes(lengths, GRID, cost, max_length=32, max_count=count, window=16)
    assert planned(lengths, chosen, cost, 16) <= 1.02 * least


def test_few_chosen_shapes_beat_a_grid_of_many() -> None:
    lengths = log_normal(2000, 40)
    candidates = candidate_shapes(256)
    cost = formula(candidates)
    chosen = choose_shapes(lengths, candidates, cost, max_length=256, max_count=16)
    assert len(chosen) == 16
    ideal = ideal_cost(lengths, cost)
    assert ideal / expected_cost(lengths, chosen, cost) > 0.8
    assert expected_cost(lengths, chosen, cost) < expected_cost(lengths, default_shapes(256), cost)
    assert chosen == choose_shapes(lengths, candidates[::-1], cost, max_length=256, max_count=16)


def test_memory_bounds_the_number_of_shapes() -> None:
    cost = formula(GRID)
    lengths = [5, 9, 17, 30] * 10

    def count(memory_bytes: int) -> int:
        found = choose_shapes(
            lengths, GRID, cost, max_length=32, memory_bytes=memory_bytes, bytes_per_shape=100
        )
        return len(found)

    assert count(99) == 1  # one shape there has to be
    assert count(250) == 2
    assert count(10_000) == len(choose_shapes(lengths, GRID, cost, max_length=32)) > 2


def test_a_share_of_idle_texts_keeps_shapes_for_them() -> None:
    lengths = [8] * 64
    shapes = [(1, 8), (1, 32), (3, 8)]
    cost = {(1, 8): 1.0, (1, 32): 3.0, (3, 8): 2.7}
    busy = choose_shapes(lengths, shapes, cost, max_length=32, max_count=2, window=3)
    assert busy == [(1, 32), (3, 8)]
    assert choose_shapes(lengths, shapes, cost, max_length=32, max_count=2, window=3, idle=0.5) == [
        (1, 8),
        (1, 32),
    ]


@given(LENGTHS, SUBSETS)
def test_nothing_is_cheaper_than_no_padding(lengths: list[int], shapes: list[Shape]) -> None:
    cost = formula(candidate_shapes(32) + GRID)
    assert ideal_cost(lengths, cost) <= expected_cost(lengths, shapes, cost, 16) + 1e-9


def test_shapes_that_hold_too_little_are_an_error() -> None:
    cost = formula(GRID)
    with pytest.raises(ValueError, match="no candidate holds a text of length 33"):
        choose_shapes([5], GRID, cost, max_length=33)
    with pytest.raises(ValueError, match="a text that no candidate holds"):
        choose_shapes([40], GRID, cost, max_length=32)
    with pytest.raises(ValueError, match="no lengths"):
        choose_shapes([], GRID, cost, max_length=32)


@pytest.mark.parametrize("max_length", [5, 32, 100, 512, 8192])
def test_the_candidates_hold_the_longest_text_and_the_default_shapes(max_length: int) -> None:
    candidates = candidate_shapes(max_length)
    assert len(set(candidates)) == len(candidates)
    assert set(default_shapes(max_length)) <= set(candidates)
    assert max(sequence for _, sequence in candidates) == max_length
    assert all(batch * sequence <= 2048 for batch, sequence in candidates if batch > 1)


class TestLengthCounter:
    def test_its_sample_is_spread_like_what_it_saw(self) -> None:
        counter = LengthCounter(64)
        seen = log_normal(10_000, 20, 64)
        for at in range(0, len(seen), 100):
            counter.add(seen[at : at + 100])
        sample = counter.sample(1000)
        assert len(sample) == 1000
        assert sorted(sample)[::100] == sorted(seen)[5::1000]
        assert sample != sorted(sample)

    def test_it_returns_all_of_a_few_lengths(self) -> None:
        counter = LengthCounter(16)
        assert counter.sample() == []
        counter.add([])
        counter.add([3, 16, 3])
        assert sorted(counter.sample()) == [3, 3, 16]

    def test_what_came_long_ago_counts_less(self) -> None:
        counter = LengthCounter(16, half_life=1000)
        for length in (2, 9, 9, 9):
            counter.add([length] * 1000)
        assert counter.total == 500 + 250 + 125 + 62
        assert counter.sample().count(2) == 62

    def test_a_length_beyond_its_bound_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="shape"):
            LengthCounter(16).add([17])


class TestBetterShapes:
    candidates = candidate_shapes(256)
    cost = formula(candidates)

    def test_it_suggests_shapes_that_save_a_tenth(self) -> None:
        present = [(1, 256), (8, 256), (8, 128)]
        counter = LengthCounter(256)
        counter.add(log_normal(4000, 40))
        found = better_shapes(counter, present, self.candidates, self.cost, max_length=256)
        assert found is not None
        assert len(found.shapes) == 3
        assert 0.1 <= found.saving < 1
        sample = counter.sample()
        now = expected_cost(sample, present, self.cost)
        then = expected_cost(sample, found.shapes, self.cost)
        assert 1 - then / now == pytest.approx(found.saving, abs=0.05)
        more = better_shapes(counter, present, self.candidates, self.cost, max_length=256, max_count=12)
        assert more is not None
        assert more.saving > found.saving

    def test_it_says_nothing_where_little_would_be_saved(self) -> None:
        counter = LengthCounter(256)
        counter.add(log_normal(4000, 40))
        chosen = choose_shapes(counter.sample(), self.candidates, self.cost, max_length=256, max_count=8)
        assert better_shapes(counter, chosen, self.candidates, self.cost, max_length=256) is None

    def test_it_says_nothing_before_it_saw_a_thousand_texts(self) -> None:
        counter = LengthCounter(256)
        counter.add([8] * 999)
        assert better_shapes(counter, [(1, 256)], self.candidates, self.cost, max_length=256) is None
        counter.add([8])
        assert better_shapes(counter, [(1, 256)], self.candidates, self.cost, max_length=256, max_count=2)
