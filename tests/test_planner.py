"""The planner against its definition: every item once, in a shape that fits, at the least total cost."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import InputFileError
from gristmill_worker.batching.costs import formula
from gristmill_worker.batching.planner import Batch, Planner, plan
from gristmill_worker.batching.shapes import check_shapes, default_shapes
from gristmill_worker.engines.base import Shape

SHAPES = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([4, 8, 16])), min_size=1, max_size=6, unique=True
).map(lambda shapes: [*shapes, (1, 16)])
LENGTHS = st.lists(st.integers(1, 16), max_size=7)
ANY_COSTS = st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12)


def total(batches: Sequence[Batch], cost: dict[Shape, float]) -> float:
    return sum(cost[batch.shape] for batch in batches)


def least_cost(lengths: Sequence[int], shapes: Sequence[Shape], cost: dict[Shape, float]) -> float:
    """Try every partition of the items into groups."""

    @cache
    def best(left: frozenset[int]) -> float:
        if not left:
            return 0.0
        first, others = min(left), sorted(left - {min(left)})
        found = []
        for bits in range(2 ** len(others)):
            group = {first, *(item for i, item in enumerate(others) if bits >> i & 1)}
            longest = max(lengths[i] for i in group)
            fitting = [cost[s] for s in shapes if s[0] >= len(group) and s[1] >= longest]
            if fitting:
                found.append(min(fitting) + best(left - group))
        return min(found)

    return best(frozenset(range(len(lengths))))


@given(LENGTHS, SHAPES)
def test_every_item_is_in_one_batch_that_fits(lengths: list[int], shapes: list[Shape]) -> None:
    batches = plan(lengths, shapes, formula(shapes))
    assert sorted(i for batch in batches for i in batch.items) == list(range(len(lengths)))
    for batch in batches:
        assert batch.shape in shapes
        assert 1 <= len(batch.items) <= batch.shape[0]
        assert all(lengths[i] <= batch.shape[1] for i in batch.items)


@given(LENGTHS, SHAPES)
def test_no_partition_is_cheaper(lengths: list[int], shapes: list[Shape]) -> None:
    cost = formula(shapes)
    assert total(plan(lengths, shapes, cost), cost) == pytest.approx(least_cost(lengths, shapes, cost))


@given(LENGTHS, SHAPES, ANY_COSTS)
def test_no_partition_is_cheaper_where_larger_shapes_cost_less(
    lengths: list[int], shapes: list[Shape], prices: list[float]
) -> None:
    cost = dict(zip(sorted(set(shapes)), prices, strict=False))
    batches = plan(lengths, shapes, cost)
    assert sorted(i for batch in batches for i in batch.items) == list(range(len(lengths)))
    assert total(batches, cost) == pytest.approx(least_cost(lengths, shapes, cost))


@given(st.lists(LENGTHS, max_size=4), SHAPES)
def test_a_planner_plans_every_window_as_if_it_were_its_first(
    windows: list[list[int]], shapes: list[Shape]
) -> None:
    planner = Planner(shapes, formula(shapes))
    assert [planner.plan(lengths) for lengths in windows] == [
        plan(lengths, shapes, formula(shapes)) for lengths in windows
    ]


@given(st.integers(1, 16), SHAPES, ANY_COSTS)
def test_a_window_of_one_takes_the_cheapest_shape_that_was_found_before(
    length: int, shapes: list[Shape], prices: list[float]
) -> None:
    cost = dict(zip(sorted(set(shapes)), prices, strict=False))
    planner = Planner(shapes, cost)
    (batch,) = planner.plan([length])
    assert batch.items == (0,)
    assert cost[batch.shape] == min(cost[shape] for shape in shapes if shape[1] >= length)
    assert planner.plan([length])[0] is batch


@given(st.lists(st.integers(1, 512), min_size=1, max_size=300))
def test_it_is_never_worse_than_arrival_order_or_sort_and_cut(lengths: list[int]) -> None:
    shapes = default_shapes(512)
    cost = formula(shapes)

    def cut(order: Sequence[int], size: int) -> float:
        spent = 0.0
        for start in range(0, len(order), size):
            group = order[start : start + size]
            longest = max(lengths[i] for i in group)
            fitting = [cost[s] for s in shapes if s[0] >= len(group) and s[1] >= longest]
            spent += min(fitting) if fitting else sum(cost[1, 512] for _ in group)
        return spent

    planned = total(plan(lengths, shapes, cost), cost)
    arrival = range(len(lengths))
    by_length = sorted(arrival, key=lengths.__getitem__)
    for size in (1, 4, 8, 32):
        assert planned <= cut(arrival, size) + 1e-6
        assert planned <= cut(by_length, size) + 1e-6


@given(LENGTHS, SHAPES)
def test_the_batch_with_the_oldest_item_comes_first(lengths: list[int], shapes: list[Shape]) -> None:
    oldest = [min(batch.items) for batch in plan(lengths, shapes, formula(shapes))]
    assert oldest == sorted(oldest)


@given(LENGTHS, SHAPES, st.data())
def test_the_batch_with_the_earliest_deadline_comes_first(
    lengths: list[int], shapes: list[Shape], data: st.DataObject
) -> None:
    times = st.sampled_from([1.0, 2.0, 3.0, float("inf")])
    deadlines = data.draw(st.lists(times, min_size=len(lengths), max_size=len(lengths)))
    batches = Planner(shapes, formula(shapes)).plan(lengths, deadlines)
    urgency = [(min(deadlines[i] for i in batch.items), min(batch.items)) for batch in batches]
    assert urgency == sorted(urgency)
    assert sorted(batches, key=lambda batch: batch.items) == sorted(
        plan(lengths, shapes, formula(shapes)), key=lambda batch: batch.items
    )


def test_an_empty_window_needs_no_batch() -> None:
    assert plan([], [(1, 16)], {(1, 16): 1.0}) == []


def test_an_item_longer_than_every_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match="no shape holds an item of length 17"):
        plan([3, 17], [(1, 16)], {(1, 16): 1.0})


def test_the_default_shapes_hold_the_longest_text_and_bound_the_tokens() -> None:
    shapes = default_shapes(300)
    assert (1, 300) in shapes
    assert max(sequence for _, sequence in shapes) == 300
    assert all(batch * sequence <= 2048 for batch, sequence in shapes if batch > 1)
    assert (1, 8192) in default_shapes(8192)


def test_configured_shapes_have_to_hold_the_longest_text() -> None:
    assert check_shapes([(8, 16), (1, 64), (8, 16)], 64) == [(1, 64), (8, 16)]
    with pytest.raises(InputFileError, match=r"\[1, 64\]"):
        check_shapes([(8, 32)], 64)
