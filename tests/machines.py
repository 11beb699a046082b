"""Trees of /proc and /sys of machines that are not here.

They are laid out after the kernel's documentation of these files and the published core numbering of such
machines; they are no recordings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gristmill_worker.cpus import format_cpu_list

CGROUP2 = "31 23 0:26 {root} /sys/fs/cgroup rw,nosuid,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
CGROUP1 = "{number} 31 0:{number} {root} /sys/fs/cgroup/{name} rw,nosuid - cgroup cgroup rw,{name}\n"


@dataclass
class Machine:
    """A machine below the folder ``root``; numbers of CPUs are those of the kernel."""

    root: Path
    cpus: list[int] = field(default_factory=list)

    def write(self, name: str, text: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def core(
        self, cpus: Sequence[int], *, package: int = 0, core_id: int = 0, capacity: int | None = None
    ) -> None:
        """Add a physical core of these logical CPUs."""
        for cpu in cpus:
            folder = f"sys/devices/system/cpu/cpu{cpu}"
            for name in ("core_cpus_list", "thread_siblings_list"):
                self.write(f"{folder}/topology/{name}", format_cpu_list(cpus))
            self.write(f"{folder}/topology/core_id", core_id)
            self.write(f"{folder}/topology/physical_package_id", package)
            if capacity is not None:
                self.write(f"{folder}/cpu_capacity", capacity)
        self.cpus = sorted({*self.cpus, *cpus})
        self.write("sys/devices/system/cpu/online", format_cpu_list(self.cpus))

    def nodes(self, cpus: Mapping[int, Iterable[int]], *, gigabytes: int = 64, allowed: str = "") -> None:
        """Add NUMA nodes with these CPUs and so much memory each."""
        for node, members in cpus.items():
            folder = f"sys/devices/system/node/node{node}"
            self.write(f"{folder}/cpulist", format_cpu_list(sorted(members)))
            self.write(
                f"{folder}/meminfo",
                f"Node {node} MemTotal:       {gigabytes << 20} kB\nNode {node} MemFree:        1024 kB",
            )
        for name in ("online", "has_memory"):
            self.write(f"sys/devices/system/node/{name}", format_cpu_list(cpus))
        self.write(
            "proc/self/status",
            f"Name:\tpython\nMems_allowed:\tff\nMems_allowed_list:\t{allowed or format_cpu_list(cpus)}",
        )

    def cgroup2(self, path: str, files: Mapping[str, object], *, mounted: str = "/") -> None:
        """Put the process into the group ``path``; the mount point shows ``mounted`` and has ``files``."""
        self.write("proc/self/cgroup", f"0::{path}")
        self.write("proc/self/mountinfo", CGROUP2.format(root=mounted))
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{name}", text)

    def cgroup1(self, path: str, files: Mapping[str, object], *, mounted: str = "/") -> None:
        """The same with version 1: ``files`` begin with a controller's name."""
        names = ("cpu", "cpuset", "memory")
        self.write("proc/self/cgroup", "\n".join(f"{i}:{name}:{path}" for i, name in enumerate(names, 1)))
        mounts = (CGROUP1.format(number=32 + i, root=mounted, name=name) for i, name in enumerate(names))
        self.write("proc/self/mountinfo", "".join(mounts))
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{name}", text)


def xeon_2_sockets(root: Path) -> Machine:
    """Two sockets of 20 cores with SMT; as on many such servers the numbers alternate between the sockets."""
    machine = Machine(root)
    for core in range(40):
        machine.core((core, core + 40), package=core % 2, core_id=core // 2)
    machine.nodes({node: range(node, 80, 2) for node in range(2)}, gigabytes=192)
    return machine


def epyc_nps4(root: Path) -> Machine:
    """Two sockets of 64 cores with SMT, each divided into four nodes."""
    machine = Machine(root)
    for core in range(128):
        machine.core((core, core + 128), package=core // 64, core_id=core % 64)
    machine.nodes({node: [16 * node + i + smt for smt in (0, 128) for i in range(16)] for node in range(8)})
    return machine


def sapphire_rapids_snc4(root: Path) -> Machine:
    """One socket of 56 cores with SMT in four clusters, and a node of memory alone (CXL)."""
    machine = Machine(root)
    for core in range(56):
        machine.core((core, core + 56), core_id=core)
    machine.nodes(
        {**{node: [14 * node + i + smt for smt in (0, 56) for i in range(14)] for node in range(4)}, 4: ()}
    )
    return machine


def laptop(root: Path) -> Machine:
    """Six performance cores with SMT and eight efficiency cores without; one node."""
    machine = Machine(root)
    for core in range(6):
        machine.core((2 * core, 2 * core + 1), core_id=4 * core)
    for core in range(12, 20):
        machine.core((core,), core_id=12 + core)
    machine.nodes({0: range(20)}, gigabytes=32)
    machine.write("sys/devices/cpu_core/cpus", "0-11")
    machine.write("sys/devices/cpu_atom/cpus", "12-19")
    return machine


def arm_board(root: Path) -> Machine:
    """Four little and four big Arm cores, of which two clock a little higher; a kernel without NUMA."""
    machine = Machine(root)
    for core, capacity in enumerate([414] * 4 + [1000, 1000, 1024, 1024]):
        machine.core((core,), package=-1, core_id=core, capacity=capacity)
    return machine


def container(root: Path, *, cpu_max: str = "150000 100000") -> Machine:
    """A container on a machine of 8 cores with SMT; it sees its own group at the top, and no nodes."""
    machine = Machine(root)
    for core in range(8):
        machine.core((core, core + 8), core_id=core)
    machine.cgroup2("/", {"cpu.max": cpu_max, "memory.max": 2 << 30, "cpuset.cpus.effective": "0-15"})
    machine.write("proc/meminfo", f"MemTotal:       {64 << 20} kB")
    return machine
