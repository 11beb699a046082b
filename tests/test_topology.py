"""Cores, nodes, limits: what is read of a machine, what is planned, and how a process keeps to it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import machines
from conftest import Workers
from gristmill import Client
from gristmill.errors import ExitCode, InputFileError
from gristmill_worker.cpus import format_cpu_list, parse_cpu_list
from gristmill_worker.topology.cgroups import Limits
from gristmill_worker.topology.facts import Cpu, Facts, read_facts
from gristmill_worker.topology.plan import CoreSet, core_set_of, plan
from gristmill_worker.topology.report import as_text


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
        with pytest.raises(InputFileError, match=r"no worker of 17 cores fits.*16 on node 0, 16 on node 1"):
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
            InputFileError, match=r"at most 14 worker\(s\) of 1 core\(s\) fit.*8 efficiency on node 0, 6 fast"
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
            (2, 2, r"at most 1 worker\(s\) of 2 core\(s\) fit"),
            (1, 4, "no worker of 4 cores fits"),
            (4, "auto", r"at most 3 worker\(s\) of 1 core\(s\) fit"),
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

    def test_cpus_are_written_as_they_are_read(self) -> None:
        assert format_cpu_list((8, 0, 1, 2, 2)) == "0-2,8"
        assert parse_cpu_list("0-2,8") == (0, 1, 2, 8)
        assert format_cpu_list(()) == ""


@st.composite
def drawn_facts(draw: st.DrawFn) -> Facts:
    """Any machine: cores of both kinds and of 1 to 4 CPUs, some of them usable, on up to 5 nodes or none."""
    cpus: list[Cpu] = []
    number = 0
    numa = draw(st.booleans())
    for _ in range(draw(st.integers(1, 24))):
        node = draw(st.integers(0, 4)) if numa else None
        first, fast = number, draw(st.booleans())
        for _ in range(draw(st.integers(1, 4))):
            cpus.append(Cpu(number, first, 0, node, fast))
            number += 1
    usable = draw(st.lists(st.sampled_from(cpus), min_size=1, unique=True))
    usable.sort(key=lambda cpu: cpu.number)
    quota = draw(st.none() | st.floats(0.01, 64))
    return Facts(tuple(usable), number, (), None, Limits(quota), (), None)


COUNTS = st.just("auto") | st.integers(1, 30)


@given(drawn_facts(), COUNTS, COUNTS)
def test_no_plan_shares_a_core_crosses_a_node_or_exceeds_a_limit(
    facts: Facts, workers: int | Literal["auto"], width: int | Literal["auto"]
) -> None:
    try:
        found = plan(facts, workers=workers, cores_per_worker=width)
    except InputFileError:
        # Workers of one core always fit, one of them in any case.
        assert workers not in ("auto", 1) or width not in ("auto", 1)
        return
    by_number = {cpu.number: cpu for cpu in facts.cpus}
    bound = [by_number[number] for core_set in found for number in core_set.cpus]
    assert len({cpu.core for cpu in bound}) == len(bound)  # no core twice, and no SMT sibling of one
    for core_set in found:
        assert core_set.threads == len(core_set.cpus) == (1 if width == "auto" else width)
        assert {by_number[number].node for number in core_set.cpus} == {core_set.node}
        assert len({by_number[number].fast for number in core_set.cpus}) == 1
    assert len(bound) <= max(1, facts.limits.cpus or len(bound))
    assert workers in ("auto", len(found))
    kinds = Counter(cpu.fast for cpu in facts.cores)
    if workers == width == "auto" and facts.limits.cpus is None:
        assert len(found) == (kinds[True] or kinds[False])


def threads_of(pid: int) -> dict[str, str]:
    """Return the CPUs of every thread of a process, by its number."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        status = (thread / "status").read_text()
        found[thread.name] = next(
            line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list")
        )
    return found


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own: what is bound stays so."""
    head = (
        "import os\nfrom pathlib import Path\n"
        "from gristmill_worker.topology.bind import bind\n"
        "from gristmill_worker.topology.plan import CoreSet\n"
    )
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


class TestHere:
    """What the kernel of this machine says of real processes; tests/guest runs them on one with two nodes."""

    @pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
    def test_every_thread_of_a_worker_stays_in_its_core_set(
        self, workers: Workers, client: Client, queue: str, tiny_classifier: Path, engine: str
    ) -> None:
        cpu = max(os.sched_getaffinity(0))
        # More engine threads than CPUs: an engine that spreads its threads itself would show.
        process = workers.start(tiny_classifier, "--cores", str(cpu), "--threads", "2", "--engine", engine)
        assert client.score(queue, "the miller grinds the corn")
        threads = threads_of(process.pid)
        assert len(threads) > 4  # the loop's three, the pulse, the engine's
        assert set(threads.values()) == {str(cpu)}

    def test_a_worker_takes_memory_from_the_node_of_its_core_set(
        self, workers: Workers, client: Client, queue: str, tiny_classifier: Path
    ) -> None:
        cpu = read_facts().cpus[-1]
        process = workers.start(tiny_classifier, "--cores", str(cpu.number), "--memory-policy", "bind")
        assert client.score(queue, "the miller grinds the corn")
        if "memory_policy_not_set" in workers.log().read_text():
            pytest.skip("this kernel or container knows no memory policies")
        maps = Path(f"/proc/{process.pid}/numa_maps").read_text().splitlines()
        heaps = [line.split() for line in maps if " heap " in line]
        assert heaps
        assert all(heap[1] == f"bind:{cpu.node}" for heap in heaps)
        assert any(word.startswith(f"N{cpu.node}=") for heap in heaps for word in heap)

    @pytest.mark.parametrize("policy", ["bind", "preferred"])
    def test_memory_goes_to_the_node_of_the_policy_wherever_the_thread_runs(self, policy: str) -> None:
        facts = read_facts()
        if not facts.nodes:
            pytest.skip("this kernel knows of no NUMA nodes")
        node, cpu = facts.nodes[0].number, facts.cpus[-1].number
        done = in_a_process(
            f"bind(CoreSet(({cpu},), {node}, 1), {policy!r})\n"
            "taken = bytearray(b'x') * (64 << 20)\n"
            "print(Path('/proc/self/numa_maps').read_text())\n"
        )
        assert done.returncode == 0, done.stderr
        if "memory_policy_not_set" in done.stdout:
            pytest.skip("this kernel or container knows no memory policies")
        largest = max(
            re.findall(rf"^(.* anon=.* N{node}=(\d+).*)$", done.stdout, re.MULTILINE), key=lambda m: int(m[1])
        )
        assert int(largest[1]) * os.sysconf("SC_PAGE_SIZE") >= 64 << 20
        if policy == "bind" or len(facts.nodes) > 1:  # of a single node, "preferred" says nothing
            assert largest[0].split()[1] == {"bind": f"bind:{node}", "preferred": f"prefer:{node}"}[policy]

    def test_what_was_taken_before_moves_to_the_node_of_the_policy(self) -> None:
        facts = read_facts()
        if not facts.nodes:
            pytest.skip("this kernel knows of no NUMA nodes")
        cpu, first, last = facts.cpus[0].number, facts.nodes[0].number, facts.nodes[-1].number
        done = in_a_process(
            f"bind(CoreSet(({cpu},), {first}, 1), 'bind')\n"
            "taken = bytearray(b'x') * (64 << 20)\n"
            f"bind(CoreSet(({cpu},), {last}, 1), 'bind')\n"
            "print(Path('/proc/self/numa_maps').read_text())\n"
        )
        assert done.returncode == 0, done.stderr
        if "memory_policy_not_set" in done.stdout:
            pytest.skip("this kernel or container knows no memory policies")
        pages = [int(found) for found in re.findall(rf" anon=.* N{last}=(\d+)", done.stdout)]
        assert max(pages) * os.sysconf("SC_PAGE_SIZE") >= 64 << 20

    def test_a_node_that_is_not_there_is_a_warning(self) -> None:
        done = in_a_process(
            "cpus = tuple(os.sched_getaffinity(0))\n"
            "bind(CoreSet(cpus, 63, 1), 'bind')\n"
            "bind(CoreSet(cpus, None, 1), 'bind')\n"
            "bind(CoreSet(cpus, None, 1), 'preferred')\n"
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("memory_policy_not_set") == 2
        assert "Invalid argument" in done.stdout

    def test_a_container_that_refuses_memory_policies_is_a_warning(self) -> None:
        done = in_a_process(
            # What containers do: a filter that answers EPERM to the call. See seccomp(2) for the numbers.
            "import ctypes, struct\n"
            "from gristmill_worker.topology import memory\n"
            "number = memory._numbers()[0]\n"
            "refuse, allow = (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7fff0000)\n"
            "lines = ((0x20, 0, 0, 0), (0x15, 0, 1, number), refuse, allow)\n"
            "program = b''.join(struct.pack('HBBI', *line) for line in lines)\n"
            "kept = ctypes.create_string_buffer(program)\n"
            "head = struct.pack('HL', len(lines), ctypes.addressof(kept))\n"
            "prctl = ctypes.CDLL(None, use_errno=True).prctl\n"
            "assert prctl(38, ctypes.c_ulong(1), 0, 0, 0) == 0\n"
            "assert prctl(22, ctypes.c_ulong(2), head, 0, 0) == 0\n"
            "cpu = max(os.sched_getaffinity(0))\n"
            "bind(CoreSet((cpu,), 0, 1), 'bind')\n"
            "assert os.sched_getaffinity(0) == {cpu}\n"
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("memory_policy_not_set") == 1
        assert "Operation not permitted" in done.stdout
        assert "SYS_NICE" in done.stdout

    def test_cores_that_are_not_there_end_a_worker_with_what_there_is(
        self, workers: Workers, tiny_classifier: Path
    ) -> None:
        process = workers.start(tiny_classifier, "--cores", "4000", ready=False)
        assert process.wait(60) == ExitCode.BAD_INPUT
        assert f"this process may use {sorted(os.sched_getaffinity(0))}" in workers.log().read_text()


def topology(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gristmill_worker", "topology", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


class TestCommand:
    def test_it_shows_the_plan_of_this_machine(self) -> None:
        first = min(os.sched_getaffinity(0))
        done = topology("--workers", "1")
        assert done.returncode == ExitCode.OK, done.stderr
        assert f"--cores {first} --threads 1" in done.stdout
        shown = json.loads(topology("--workers", "1", "--json").stdout)
        assert shown["plan"] == [{"cpus": [first], "node": shown["facts"]["cpus"][0]["node"], "threads": 1}]
        assert [cpu["number"] for cpu in shown["facts"]["cpus"]] == sorted(os.sched_getaffinity(0))

    def test_what_does_not_fit_is_bad_input_and_nonsense_is_wrong_usage(self) -> None:
        done = topology("--workers", "100000")
        assert done.returncode == ExitCode.BAD_INPUT
        assert "at most" in done.stderr
        for wrong in ("0", "-1", "some", "1.5"):
            done = topology("--cores-per-worker", wrong)
            assert done.returncode == ExitCode.USAGE
            assert "neither 'auto' nor a number" in done.stderr

    def test_every_fact_has_a_line(self, tmp_path: Path) -> None:
        machine = machines.laptop(tmp_path)
        machine.cgroup2("/", {"cpu.max": "250000 100000", "memory.max": 4 << 30})
        machine.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", 512)
        facts = read_facts(tmp_path, machine.cpus)
        text = as_text(facts, plan(facts))
        for line in (
            "20 of 20 logical CPUs (0-19), 14 physical cores",
            "8 of these are efficiency cores: 12-19",
            "CPU limit    2.5 CPUs, says /sys/fs/cgroup/cpu.max",
            "memory limit 4.0 GiB",
            "NUMA node 0  CPUs 0-19, 32.0 GiB",
            "512 of 2 MiB set aside (0 free)",
            "plan         2 worker(s) of 1 thread(s)",
            "worker 1   CPUs 2 on node 0: serve --cores 2 --threads 1",
        ):
            assert line in text
