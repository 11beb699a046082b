"""How several models divide a machine's cores, and who of those that are loaded on demand has a place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import InputFileError
from gristmill_worker.supervisor.demand import TURN_S, Lazy, choose_awake
from gristmill_worker.supervisor.shares import Wish, share_cores
from gristmill_worker.topology.cgroups import Limits
from gristmill_worker.topology.facts import Cpu, Facts


def facts(cores: int, *, siblings: bool = False, nodes: int = 1, quota: float | None = None) -> Facts:
    """Return a machine of ``cores`` physical cores; the siblings' numbers follow those of the cores."""
    per_node = -(-cores // nodes)
    first = [Cpu(i, core=i, package=0, node=i // per_node, fast=True) for i in range(cores)]
    second = [replace(cpu, number=cpu.number + cores) for cpu in first] if siblings else []
    return Facts((*first, *second), len(first) + len(second), (), None, Limits(cpus=quota), (), None)


def cpus(facts: Facts, *wishes: Wish) -> list[list[tuple[int, ...]]]:
    return [[each.cpus for each in share] for share in share_cores(facts, wishes)]


def test_what_is_not_named_is_divided_evenly() -> None:
    assert cpus(facts(5), Wish(), Wish()) == [[(0,), (1,)], [(2,), (3,), (4,)]]


def test_who_names_a_number_gets_it_first() -> None:
    assert cpus(facts(4), Wish(), Wish(workers=1, cores_per_worker=2)) == [[(2,), (3,)], [(0, 1)]]


def test_siblings_of_a_core_go_with_it() -> None:
    assert cpus(facts(2, siblings=True), Wish(workers=1), Wish()) == [[(0,)], [(1,)]]


def test_more_models_than_cores_have_a_worker_each_in_turn_on_all_cores() -> None:
    assert cpus(facts(2), *[Wish()] * 5) == [[(0,)], [(1,)], [(0,)], [(1,)], [(0,)]]


def test_a_quota_is_shared_as_cores_are() -> None:
    found = cpus(facts(8, quota=2.5), Wish(workers=1), Wish(), Wish())
    assert [len(share) for share in found] == [1, 1, 1]
    assert found[0] != found[1]


def test_cores_that_one_is_kept_to_are_respected() -> None:
    assert cpus(facts(4), Wish(cores=(3,)), Wish()) == [[(3,)], [(0,), (1,), (2,)]]


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(InputFileError, match=r"at most 1 worker\(s\) of 1 core\(s\) fit"):
        share_cores(facts(3), [Wish(workers=2), Wish(workers=2)])


@given(
    cores=st.integers(1, 12),
    nodes=st.integers(1, 3),
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=5),
)
def test_everybody_gets_something_and_no_core_twice_while_there_are_enough(
    cores: int, nodes: int, widths: list[int]
) -> None:
    machine = facts(cores, nodes=nodes)
    try:
        shares = share_cores(machine, [Wish(cores_per_worker=width) for width in widths])
    except InputFileError:
        assert cores < nodes * max(widths)  # one is too wide for any node
        return
    assert all(shares)
    taken = [cpu for share in shares for each in share for cpu in each.cpus]
    if len(set(taken)) < len(taken):
        assert cores < sum(widths) + nodes * max(widths)
    node_of = {cpu.number: cpu.node for cpu in machine.cpus}
    assert all(len({node_of[cpu] for cpu in each.cpus}) == 1 for share in shares for each in share)


def lazy(
    queue: str, entries: int = 0, used_at: float = 0.0, turn_at: float | None = None, *, awake: bool = False
) -> Lazy:
    return Lazy(queue, 10.0, entries, used_at, awake=awake or turn_at is not None, turn_at=turn_at)


class TestOnDemand:
    def test_only_what_is_asked_for_is_loaded(self) -> None:
        assert choose_awake([lazy("a", 1), lazy("b")], 5, now=0.0) == {"a"}

    def test_it_stays_until_it_was_idle_for_long(self) -> None:
        models = [lazy("a", used_at=95.0, turn_at=0.0), lazy("b", used_at=80.0, turn_at=0.0)]
        assert choose_awake(models, 5, now=100.0) == {"a"}

    def test_the_least_recently_used_gives_way(self) -> None:
        there = [lazy("a", used_at=96.0, turn_at=0.0), lazy("b", used_at=95.0, turn_at=50.0)]
        assert choose_awake([*there, lazy("c", 1)], 2, now=100.0) == {"a", "c"}

    def test_who_has_work_gives_way_after_its_turn_only(self) -> None:
        there = [lazy("a", 9, turn_at=100.0), lazy("b", 9, turn_at=99.0)]
        assert choose_awake([*there, lazy("c", 1)], 2, now=101.0) == {"a", "b"}
        assert choose_awake([*there, lazy("c", 1)], 2, now=100.5 + TURN_S) == {"a", "c"}

    def test_who_still_loads_has_not_had_its_turn(self) -> None:
        models = [lazy("a", 9, awake=True), lazy("b", 9)]
        assert choose_awake(models, 1, now=10 * TURN_S) == {"a"}

    def test_all_that_have_work_all_the_time_have_their_turn(self) -> None:
        models = [lazy(name, 9) for name in "abcd"]
        seen = []
        for turn in range(1, 9):
            (queue,) = choose_awake(models, 1, now=2 * TURN_S * turn)
            for each in models:
                if each.awake and each.queue != queue:
                    each.left_at = 2 * TURN_S * turn
                each.awake = each.queue == queue
                each.turn_at = 2 * TURN_S * turn if each.awake else None
            seen.append(queue)
        assert seen == [*"abcd", *"abcd"]


def test_a_number_for_which_others_leave_no_core_is_refused_with_advice() -> None:
    with pytest.raises(InputFileError, match="leave no core for this one"):
        share_cores(facts(1), [Wish(workers=1), Wish(workers=1)])


def test_cpus_that_may_not_be_used_are_named() -> None:
    with pytest.raises(InputFileError, match="may not use 7, 9"):
        share_cores(facts(4), [Wish(), Wish(cores=(3, 7, 9))])


def test_few_workers_are_spread_over_the_nodes() -> None:
    assert cpus(facts(96, siblings=True, nodes=2), Wish(workers=2)) == [[(0,), (48,)]]
