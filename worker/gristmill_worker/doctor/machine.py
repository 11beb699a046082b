"""Checks of the machine: what the CPU computes, what is left of it to this process, settings of the kernel.

Each takes facts and returns a finding, or None where there is nothing to look at. Nothing is changed.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gristmill_worker.cpus import format_cpu_list
from gristmill_worker.doctor.finding import Finding, Level
from gristmill_worker.topology.facts import CPUS, Facts
from gristmill_worker.topology.kernel import read_int, read_line

_AMX: Final = frozenset({"amx_int8", "amx_bf16"})
_VNNI: Final = frozenset({"avx512_vnni", "avx_vnni"})
_DYNAMIC_DRIVERS: Final = frozenset({"intel_pstate", "amd-pstate-epp"})  # their "powersave" is no slow clock
_MUCH_THROTTLED: Final = 0.01  # share of periods
_MUCH_SET_ASIDE: Final = 0.1  # share of the memory


def check_machine(facts: Facts, features: frozenset[str], root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what every check of the machine finds."""
    found = (
        check_features(features),
        check_cores(facts),
        check_quota(facts),
        check_throttling(facts, root),
        check_governor(facts, root),
        check_numa_balancing(facts, root),
        check_node_memory(facts),
        check_huge_pages(facts),
        check_transparent_huge_pages(facts),
        check_overcommit(root),
    )
    yield from (finding for finding in found if finding is not None)


def check_features(features: frozenset[str], machine: str = platform.machine()) -> Finding:
    """Say what the CPU computes fast."""
    name = "CPU features"
    listed = ", ".join(sorted(features)) or "none that engines look for"
    if machine != "x86_64":
        return Finding(name, Level.NOTE, listed)
    if "avx2" not in features:
        fix = "run workers on a CPU with AVX2, or let the hypervisor pass it on (CPU model 'host')"
        return Finding(name, Level.WARNING, f"{listed}: without AVX2 engines take their slowest way", fix)
    if not features & (_AMX | _VNNI):
        fix = "run workers in fp32 here; int8 pays on CPUs with VNNI or AMX (a hypervisor may hide these)"
        return Finding(name, Level.NOTE, f"{listed}: neither VNNI nor AMX", fix)
    return Finding(name, Level.OK, listed)


def check_cores(facts: Facts) -> Finding:
    """Say how many this process may use."""
    slow = sum(not cpu.fast for cpu in facts.cores)
    kinds = f", {slow} of them efficiency cores" if 0 < slow < len(facts.cores) else ""
    return Finding(
        "cores",
        Level.OK,
        f"{len(facts.cores)} physical cores of {len(facts.cpus)} logical CPUs{kinds}",
    )


def check_quota(facts: Facts) -> Finding | None:
    """Look at the CPU limit of the control group."""
    quota = facts.limits.cpus
    if quota is None:
        return None
    found = f"{quota:g} CPUs ({facts.limits.cpus_file})"
    if quota >= len(facts.cores):
        return Finding("CPU limit", Level.OK, f"{found}, as many as there are cores")
    if quota < 1:
        fix = "allow at least one CPU: a batch is stopped in its middle for most of each period"
        return Finding("CPU limit", Level.WARNING, found, fix)
    if quota != int(quota):
        fix = f"set it to {int(quota)} or {int(quota) + 1}: what is above a whole CPU runs no engine thread"
        return Finding("CPU limit", Level.WARNING, found, fix)
    fix = (
        "a set of CPUs (cpuset, --cpuset-cpus, static CPU manager) is better: it stops no batch in its middle"
    )
    return Finding("CPU limit", Level.NOTE, f"{found} of {len(facts.cores)} cores", fix)


def check_throttling(facts: Facts, root: Path) -> Finding | None:
    """Look at how often the control group was stopped for having used up its time."""
    if facts.limits.cpus_file is None:
        return None
    text = read_line(root / Path(facts.limits.cpus_file.lstrip("/")).parent / "cpu.stat") or ""
    stats = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    try:
        periods, throttled = int(stats["nr_periods"]), int(stats["nr_throttled"])
    except (KeyError, ValueError):
        return None
    if periods and throttled / periods > _MUCH_THROTTLED:
        fix = "fewer workers or threads, or a higher limit: see 'gristmill-worker topology'"
        return Finding(
            "throttling", Level.WARNING, f"stopped in {throttled / periods:.0%} of all periods", fix
        )
    return Finding("throttling", Level.OK, f"stopped in {throttled} of {periods} periods")


def check_governor(facts: Facts, root: Path) -> Finding | None:
    """Look at what decides about the clock of the CPUs."""
    modes = Counter(_clock_mode(root / CPUS / f"cpu{cpu.number}" / "cpufreq") for cpu in facts.cpus)
    if set(modes) == {None}:
        return Finding("governor", Level.NOTE, "not to be seen from here: the firmware or hypervisor decides")
    found = ", ".join(
        f"{mode or 'unknown'} on {count} CPUs" for mode, count in sorted(modes.items(), key=str)
    )
    if any(mode is not None and mode.startswith(("powersave", "conservative")) for mode in modes):
        fix = "cpupower frequency-set -g performance (or tuned-adm profile throughput-performance)"
        return Finding("governor", Level.WARNING, found, fix)
    return Finding("governor", Level.OK, found)


def _clock_mode(cpufreq: Path) -> str | None:
    """Return the governor; of drivers that go by a preference ``powersave`` only where that is power."""
    governor = read_line(cpufreq / "scaling_governor")
    if governor == "powersave" and read_line(cpufreq / "scaling_driver") in _DYNAMIC_DRIVERS:
        preference = read_line(cpufreq / "energy_performance_preference") or "balance_performance"
        if not preference.endswith("power"):
            return f"dynamic ({preference})"
        return f"powersave ({preference})"
    return governor


def check_numa_balancing(facts: Facts, root: Path) -> Finding | None:
    """Look at whether the kernel moves memory after threads."""
    balancing = read_int(root / "proc/sys/kernel/numa_balancing")
    with_memory = sum(node.memory_bytes > 0 for node in facts.nodes)
    if with_memory < 2:
        return None
    if balancing:
        fix = "sysctl kernel.numa_balancing=0: it can only slow workers that are bound to their node"
        return Finding("NUMA balancing", Level.WARNING, f"on, with {with_memory} nodes", fix)
    return Finding("NUMA balancing", Level.OK, "off")


def check_node_memory(facts: Facts) -> Finding | None:
    """Look for cores whose own node's memory this process may not use."""
    refused = {node.number for node in facts.nodes if not node.usable or not node.memory_bytes}
    cpus = [cpu.number for cpu in facts.cpus if cpu.node in refused]
    if not cpus:
        return None
    fix = "allow memory of the same nodes (cpuset.mems, --cpuset-mems), or other CPUs"
    found = f"CPUs {format_cpu_list(cpus)} belong to a node of which this process may use no memory"
    return Finding("NUMA memory", Level.WARNING, found, fix)


def check_huge_pages(facts: Facts) -> Finding | None:
    """Look for memory that is set aside in huge pages, which no engine asks for."""
    free = sum(pages.free * pages.size_bytes for pages in facts.huge_pages)
    if not free:
        return None
    found = f"{free / 2**30:.1f} GiB are set aside in huge pages that nothing uses; engines ask for none"
    if facts.memory_bytes and free > _MUCH_SET_ASIDE * facts.memory_bytes:
        return Finding(
            "huge pages", Level.WARNING, found, "sysctl vm.nr_hugepages=0, unless others need them"
        )
    return Finding("huge pages", Level.NOTE, found)


def check_transparent_huge_pages(facts: Facts) -> Finding | None:
    """Say whether weights may lie in huge pages without being asked."""
    mode = facts.transparent_huge_pages
    if mode is None:
        return None
    if mode == "always":
        return Finding("transparent huge pages", Level.OK, mode)
    fix = (
        "echo always > /sys/kernel/mm/transparent_hugepage/enabled may make large models faster: "
        "'gristmill-worker tune' before and after tells"
    )
    return Finding("transparent huge pages", Level.NOTE, mode, fix)


def check_overcommit(root: Path) -> Finding | None:
    """Look at whether the kernel promises more memory than there is, as the fork of a large process needs."""
    mode = read_int(root / "proc/sys/vm/overcommit_memory")
    if mode is None:
        return None
    if mode == 2:
        fix = "sysctl vm.overcommit_memory=1: engines reserve more than they use, and are refused here"
        return Finding("overcommit", Level.WARNING, "2: never more than there is", fix)
    if mode == 0:
        fix = "if Redis runs here: sysctl vm.overcommit_memory=1, or it may fail to save in the background"
        return Finding("overcommit", Level.NOTE, "0: the kernel guesses", fix)
    return Finding("overcommit", Level.OK, f"{mode}")
