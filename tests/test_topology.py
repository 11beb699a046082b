"""Cores, nodes, limits: what is read of a machine, what is planned, and how a process keeps to it."""

from __future__ import annotations

from pathlib import Path

import pytest

import machines
from gristmill.errors import InputFileError
from gristmill_worker.topology.facts import read_facts
from gristmill_worker.topology.plan import CoreSet, core_set_of, plan


def numbers(core_sets: list[CoreSet]) -> list[tuple[int, ...]]:
    return [core_set.cpus for core_set in core_sets]


class TestPlans:
    def test_two_sockets_with_smt_get_a_worker_for_each_physical_core(self, tmp_path: Path) -> None:
        machine = machines.xeon_2_sockets(tmp_path)
        facts = read_facts(tmp_path, machine.cpus)
        assert (len(facts.cpus), len(facts.cores), facts.online) == (80, 40, 80)
        assert numbers(plan(facts)) == [(core,) for core in range(40)]
        assert [core_set.node for core_set in plan(facts)] == [0, 1] * 20
        assert {core_set.threads for core_set in plan(facts)} == {1}

    def test_wide_workers_stay_on_a_socket_whose_numbers_alternate(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, machines.xeon_2_sockets(tmp_path).cpus)
        found = plan(facts, cores_per_worker=8)
        assert numbers(found) == [
            tuple(range(0, 16, 2)),
            tuple(range(1, 17, 2)),
            tuple(range(16, 32, 2)),
            tuple(range(17, 33, 2)),
        ]  # the last four cores of each socket are too few for another one
        assert [(core_set.node, core_set.threads) for core_set in found] == [(0, 8), (1, 8), (0, 8), (1, 8)]

    def test_few_workers_are_spread_over_the_nodes(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, machines.epyc_nps4(tmp_path).cpus)
        found = plan(facts, workers=10, cores_per_worker=4)
        assert [core_set.node for core_set in found] == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7]
        assert numbers(found)[:3] == [(0, 1, 2, 3), (4, 5, 6, 7), (16, 17, 18, 19)]

    def test_four_nodes_a_socket_bound_what_a_worker_can_have(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, machines.epyc_nps4(tmp_path).cpus)
        assert len(plan(facts)) == 128
        widest = plan(facts, cores_per_worker=16)
        assert [(core_set.node, core_set.cpus[0], len(core_set.cpus)) for core_set in widest] == [
            (node, 16 * node, 16) for node in range(8)
        ]
        with pytest.raises(InputFileError, match=r"not one of 17 cores fits.*16 on node 0, 16 on node 1"):
            plan(facts, cores_per_worker=17)

    def test_clusters_of_one_socket_are_nodes_and_a_node_of_memory_gets_no_worker(
        self, tmp_path: Path
    ) -> None:
        facts = read_facts(tmp_path, machines.sapphire_rapids_snc4(tmp_path).cpus)
        assert [node.number for node in facts.nodes] == [0, 1, 2, 3, 4]
        found = plan(facts, cores_per_worker=7)
        assert [core_set.node for core_set in found] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert found[1].cpus == tuple(range(7, 14))

    def test_a_laptop_uses_its_efficiency_cores_only_if_asked(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, machines.laptop(tmp_path).cpus)
        assert numbers(plan(facts)) == [(0,), (2,), (4,), (6,), (8,), (10,)]
        assert numbers(plan(facts, workers=8))[6:] == [(12,), (13,)]
        assert numbers(plan(facts, cores_per_worker=4)) == [(0, 2, 4, 6)]
        # Never both kinds in one core set: 2 fast cores are left over.
        assert numbers(plan(facts, workers=3, cores_per_worker=4))[1:] == [(12, 13, 14, 15), (16, 17, 18, 19)]
        with pytest.raises(
            InputFileError, match=r"at most 14 of 1 cores fit.*8 efficiency on node 0, 6 fast"
        ):
            plan(facts, workers=15)

    def test_where_only_efficiency_cores_are_allowed_they_are_used(self, tmp_path: Path) -> None:
        machines.laptop(tmp_path)
        assert numbers(plan(read_facts(tmp_path, {13, 15}))) == [(13,), (15,)]

    def test_an_arm_board_uses_its_big_cores(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, machines.arm_board(tmp_path).cpus)
        assert plan(facts) == [CoreSet((core,), None, 1) for core in (4, 5, 6, 7)]
        assert facts.nodes == ()
        assert {cpu.package for cpu in facts.cpus} == {0}

    @pytest.mark.parametrize(
        ("cpu_max", "workers"),
        [("150000 100000", 1), ("50000 100000", 1), ("300000 100000", 3), ("max 100000", 8)],
    )
    def test_a_quota_is_not_exceeded(self, tmp_path: Path, cpu_max: str, workers: int) -> None:
        facts = read_facts(tmp_path, machines.container(tmp_path, cpu_max=cpu_max).cpus)
        assert numbers(plan(facts)) == [(core,) for core in range(workers)]
        assert {core_set.node for core_set in plan(facts)} == {None}

    def test_more_than_the_quota_is_refused_with_what_fits(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, machines.container(tmp_path, cpu_max="350000 100000").cpus)
        assert len(plan(facts, workers=1, cores_per_worker=3)) == 1
        for workers, width, message in (
            (2, 2, "at most 1 of 2 cores fit"),
            (1, 4, "not one of 4 cores fits"),
            (4, "auto", "at most 3 of 1 cores fit"),
        ):
            with pytest.raises(InputFileError, match=f"{message}.*its limit is 3.5 CPUs"):
                plan(facts, workers=workers, cores_per_worker=width)  # type: ignore[arg-type]

    def test_siblings_that_are_not_both_allowed_are_still_one_core(self, tmp_path: Path) -> None:
        machines.xeon_2_sockets(tmp_path)
        assert numbers(plan(read_facts(tmp_path, {5, 45, 46, 47}))) == [(5,), (46,), (47,)]

    @pytest.mark.parametrize("wrong", [{"workers": 0}, {"workers": -1}, {"cores_per_worker": 0}])
    def test_numbers_that_make_no_sense_are_refused(self, tmp_path: Path, wrong: dict[str, int]) -> None:
        facts = read_facts(tmp_path, machines.laptop(tmp_path).cpus)
        with pytest.raises(InputFileError, match="has to be 'auto' or at least 1"):
            plan(facts, **wrong)

    def test_a_machine_that_tells_nothing_is_taken_as_simple(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, {2, 3})
        assert plan(facts) == [CoreSet((2,), None, 1), CoreSet((3,), None, 1)]
        assert facts.memory_bytes is None


class TestLimits:
    def test_the_strictest_group_on_the_way_up_counts(self, tmp_path: Path) -> None:
        machine = machines.xeon_2_sockets(tmp_path)
        machine.cgroup2(
            "/system.slice/gristmill.service",
            {
                "system.slice/gristmill.service/cpu.max": "max 100000",
                "system.slice/gristmill.service/memory.max": "max",
                "system.slice/cpu.max": "400000 100000",
                "system.slice/memory.max": 8 << 30,
                "system.slice/cpuset.cpus.effective": "0-9",  # that of the service has no such controller
                "other.slice/cpu.max": "100000 100000",
            },
        )
        facts = read_facts(tmp_path, machine.cpus)
        assert facts.limits.cpus == 4
        assert facts.limits.cpus_file == "/sys/fs/cgroup/system.slice/cpu.max"
        assert facts.limits.memory_bytes == 8 << 30
        assert [cpu.number for cpu in facts.cpus] == list(range(10))

    def test_a_container_without_a_namespace_finds_its_own_group(self, tmp_path: Path) -> None:
        machine = machines.xeon_2_sockets(tmp_path)
        machine.cgroup2("/docker/abc", {"cpu.max": "200000 100000"}, mounted="/docker/abc")
        assert read_facts(tmp_path, machine.cpus).limits.cpus == 2

    def test_a_group_outside_of_the_mount_leaves_what_the_mount_shows(self, tmp_path: Path) -> None:
        machine = machines.xeon_2_sockets(tmp_path)
        machine.cgroup2("/docker/abc", {"cpu.max": "200000 100000"}, mounted="/kubepods/x")
        assert read_facts(tmp_path, machine.cpus).limits.cpus == 2

    @pytest.mark.parametrize(("quota", "cpus"), [(250000, 2.5), (-1, None)])
    def test_version_1_is_read_as_well(self, tmp_path: Path, quota: int, cpus: float | None) -> None:
        machine = machines.xeon_2_sockets(tmp_path)
        machine.cgroup1(
            "/docker/abc",
            {
                "cpu/docker/abc/cpu.cfs_quota_us": quota,
                "cpu/docker/abc/cpu.cfs_period_us": 100000,
                "cpuset/docker/abc/cpuset.effective_cpus": "4-7",
                "memory/docker/abc/memory.limit_in_bytes": 1 << 30,
                "memory/docker/memory.limit_in_bytes": 9223372036854771712,
            },
        )
        facts = read_facts(tmp_path, machine.cpus)
        assert facts.limits.cpus == cpus
        assert facts.limits.memory_bytes == 1 << 30
        assert [cpu.number for cpu in facts.cpus] == [4, 5, 6, 7]

    @pytest.mark.parametrize("text", ["", "x", "max", "0 0", "100000", "1e5 100000"])
    def test_a_limit_that_cannot_be_read_is_none(self, tmp_path: Path, text: str) -> None:
        machine = machines.container(tmp_path, cpu_max=text)
        assert read_facts(tmp_path, machine.cpus).limits.cpus is None


class TestFacts:
    def test_memory_of_nodes_that_this_process_may_not_use_is_known(self, tmp_path: Path) -> None:
        machine = machines.xeon_2_sockets(tmp_path)
        machine.nodes({0: (), 1: ()}, gigabytes=192, allowed="1")
        nodes = read_facts(tmp_path, machine.cpus).nodes
        assert [(node.memory_bytes >> 30, node.usable) for node in nodes] == [(192, False), (192, True)]

    def test_huge_pages_are_counted_by_size(self, tmp_path: Path) -> None:
        machine = machines.xeon_2_sockets(tmp_path)
        for size, total, free in ((1048576, 0, 0), (2048, 512, 100)):
            folder = f"sys/kernel/mm/hugepages/hugepages-{size}kB"
            machine.write(f"{folder}/nr_hugepages", total)
            machine.write(f"{folder}/free_hugepages", free)
        machine.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        facts = read_facts(tmp_path, machine.cpus)
        assert [(pages.size_bytes >> 20, pages.total, pages.free) for pages in facts.huge_pages] == [
            (2, 512, 100),
            (1024, 0, 0),
        ]
        assert facts.transparent_huge_pages == "madvise"

    def test_chosen_cpus_have_a_node_if_it_is_one(self, tmp_path: Path) -> None:
        facts = read_facts(tmp_path, machines.xeon_2_sockets(tmp_path).cpus)
        assert core_set_of(facts, (1, 3, 43), 2) == CoreSet((1, 3, 43), 1, 2)
        assert core_set_of(facts, (0, 1), 1) == CoreSet((0, 1), None, 1)
