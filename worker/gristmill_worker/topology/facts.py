"""What the machine is and how much of it this process may use: plain data, read once."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gristmill_worker.cpus import parse_cpu_list
from gristmill_worker.topology.cgroups import Limits, read_limits
from gristmill_worker.topology.kernel import read_int, read_kilobytes, read_line, read_list

CPUS: Final = "sys/devices/system/cpu"
NODES: Final = "sys/devices/system/node"
# Of hybrid CPUs of Intel, the event sources that list the cores of each kind.
PERFORMANCE_LIST: Final = "sys/devices/cpu_core/cpus"
EFFICIENCY_LISTS: Final = ("sys/devices/cpu_atom/cpus", "sys/devices/cpu_lowpower/cpus")
# The kernel's cpu_capacity (1024: the fastest of the machine) differs a little among cores of one kind, whose
# best ones boost higher, and by a third and more between kinds (Arm big.LITTLE).
FAST_SHARE: Final = 0.7


@dataclass(frozen=True, slots=True)
class Cpu:
    """One logical CPU that this process may run on."""

    number: int
    core: int  # the lowest CPU of its physical core: SMT siblings have it in common
    package: int
    node: int | None  # None where the kernel knows of no NUMA nodes
    fast: bool  # not an efficiency core among faster ones


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node with CPUs, memory or both."""

    number: int
    memory_bytes: int
    usable: bool  # this process may take memory there


@dataclass(frozen=True, slots=True)
class HugePages:
    """Pages of one size that are set aside, whoever uses them."""

    size_bytes: int
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the planner and the doctor want to know."""

    cpus: tuple[Cpu, ...]  # in order of their numbers
    online: int  # logical CPUs of the machine
    nodes: tuple[Node, ...]
    memory_bytes: int | None
    limits: Limits
    huge_pages: tuple[HugePages, ...]
    transparent_huge_pages: str | None  # always, madvise or never

    @property
    def cores(self) -> tuple[Cpu, ...]:
        """One CPU of each physical core, in order of their numbers."""
        first: dict[int, Cpu] = {}
        for cpu in self.cpus:
            first.setdefault(cpu.core, cpu)
        return tuple(first.values())


def read_facts(root: Path = Path("/"), allowed: Collection[int] | None = None) -> Facts:
    """Read them below ``root``; ``allowed`` are the CPUs that this thread may run on, as the kernel says.

    What a kernel or container hides is taken as simple: every CPU a core of its own, all equally fast, no
    NUMA, no limit.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    limits = read_limits(root)
    # The kernel keeps a process inside its cpuset; a limit that was set a moment ago may not have arrived.
    numbers = sorted(set(allowed) & set(limits.cpu_set or allowed)) or sorted(allowed)
    node_of, nodes = _read_nodes(root)
    fast = _fast_cpus(root, numbers)
    return Facts(
        cpus=tuple(_read_cpu(root, number, node_of.get(number), fast=number in fast) for number in numbers),
        online=len(read_list(root / CPUS / "online") or numbers),
        nodes=nodes,
        memory_bytes=read_kilobytes(root / "proc/meminfo", "MemTotal"),
        limits=limits,
        huge_pages=_read_huge_pages(root),
        transparent_huge_pages=_chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"),
    )


def _read_cpu(root: Path, number: int, node: int | None, *, fast: bool) -> Cpu:
    topology = root / CPUS / f"cpu{number}" / "topology"
    siblings = read_list(topology / "core_cpus_list") or read_list(topology / "thread_siblings_list")
    package = read_int(topology / "physical_package_id")
    return Cpu(
        number=number,
        core=min(siblings or (number,)),
        package=max(0, package or 0),  # -1 where the firmware says nothing
        node=node,
        fast=fast,
    )


def _read_nodes(root: Path) -> tuple[dict[int, int], tuple[Node, ...]]:
    """Return the node of each CPU, and the nodes."""
    node_of: dict[int, int] = {}
    nodes = []
    usable = _usable_nodes(root)
    for number in sorted(
        int(folder.name.removeprefix("node")) for folder in (root / NODES).glob("node[0-9]*")
    ):
        folder = root / NODES / f"node{number}"
        node_of |= dict.fromkeys(read_list(folder / "cpulist") or (), number)
        memory = read_kilobytes(folder / "meminfo", "MemTotal") or 0
        nodes.append(Node(number, memory, usable=usable is None or number in usable))
    return node_of, tuple(nodes)


def _usable_nodes(root: Path) -> tuple[int, ...] | None:
    text = read_line(root / "proc/self/status") or ""
    found = re.search(r"^Mems_allowed_list:\s*([0-9,-]+)$", text, flags=re.MULTILINE)
    return parse_cpu_list(found[1]) if found else None


def _fast_cpus(root: Path, numbers: Collection[int]) -> set[int]:
    """Return those that are not efficiency cores among faster ones of the same machine."""
    slow: set[int] = set()
    if read_list(root / PERFORMANCE_LIST):
        for name in EFFICIENCY_LISTS:
            slow |= set(read_list(root / name) or ())
        return set(numbers) - slow
    everywhere = read_list(root / CPUS / "online") or numbers
    capacity = {number: read_int(root / CPUS / f"cpu{number}" / "cpu_capacity") for number in everywhere}
    most = max((value for value in capacity.values() if value), default=0)
    return {number for number in numbers if (capacity.get(number) or most) >= FAST_SHARE * most}


def _read_huge_pages(root: Path) -> tuple[HugePages, ...]:
    found = []
    for folder in sorted((root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        size = folder.name.removeprefix("hugepages-").removesuffix("kB")
        if size.isdigit():
            total, free = read_int(folder / "nr_hugepages"), read_int(folder / "free_hugepages")
            found.append(HugePages(int(size) * 1024, total or 0, free or 0))
    return tuple(sorted(found, key=lambda pages: pages.size_bytes))


def _chosen(path: Path) -> str | None:
    """Return the word in brackets, which of those in the file holds: ``always [madvise] never``."""
    found = re.search(r"\[([a-z+-]+)\]", read_line(path) or "")
    return found[1] if found else None
