"""How many workers, and which cores each of them gets: a pure function of the facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final, Literal

from gristmill.errors import InputFileError
from gristmill_worker.topology.facts import Cpu, Facts

Auto = Literal["auto"]
AUTO: Final[Auto] = "auto"


@dataclass(frozen=True, slots=True)
class CoreSet:
    """What one worker process is bound to."""

    cpus: tuple[int, ...]  # logical CPUs for sched_setaffinity
    node: int | None  # NUMA node that all of them belong to; None if there is no such
    threads: int  # of the engine


def plan(facts: Facts, *, workers: int | Auto = AUTO, cores_per_worker: int | Auto = AUTO) -> list[CoreSet]:
    """Return a core set for each worker, in order of their CPUs.

    One thread for a physical core: its SMT siblings share the units that multiply, and stay free for Redis
    and the kernel. A core set never crosses a NUMA node, and never mixes fast with efficiency cores, which
    would make every batch as slow as these.

    ``auto`` is one single-threaded worker for each core, which gives the most texts per second, on fast cores
    alone: a request that an efficiency core takes would wait two or three times as long. They are used where
    nothing else is allowed, or where more workers are asked for than there are fast cores.

    A CPU quota is never exceeded but by a single thread: of 1.5 CPUs one is planned. Two threads would use up
    their share of each period early, and both be stopped until the next, in the middle of a batch.

    Fewer workers than would fit are spread over the nodes, for the memory's bandwidth of all. Raises
    InputFileError, which says what fits.
    """
    width = _at_least_one("cores_per_worker", 1 if cores_per_worker == AUTO else cores_per_worker)
    fast, slow = (
        _core_sets([cpu for cpu in facts.cores if cpu.fast is kind], width) for kind in (True, False)
    )
    quota = facts.limits.cpus
    budget = len(facts.cores) if quota is None else max(1, int(quota))  # threads
    fits = min(len(fast) + len(slow), budget // width)
    wanted = len(fast) or len(slow) if workers == AUTO else _at_least_one("workers", workers)
    count = min(wanted, fits) if workers == AUTO else wanted
    if not 0 < count <= fits:
        asked = f"workers: {workers}, cores_per_worker: {cores_per_worker}"
        raise InputFileError(f"{asked}: {_what_fits(facts, width, fits)}")
    chosen = [*fast, *slow][:count]
    return sorted(chosen, key=lambda core_set: core_set.cpus)


def core_set_of(facts: Facts, cpus: Sequence[int], threads: int) -> CoreSet:
    """Return the core set of CPUs that somebody chose: whatever they are, they are taken as they stand."""
    nodes = {cpu.node for cpu in facts.cpus if cpu.number in set(cpus)}
    return CoreSet(tuple(cpus), nodes.pop() if len(nodes) == 1 else None, threads)


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise InputFileError(f"{name}: {value} has to be 'auto' or at least 1")
    return value


def _core_sets(cores: Sequence[Cpu], width: int) -> list[CoreSet]:
    """Return all core sets of ``width`` cores, the first of each node before the second of any."""
    nodes: dict[int | None, list[int]] = {}
    for cpu in cores:
        nodes.setdefault(cpu.node, []).append(cpu.number)
    by_node = [
        [CoreSet(cpus, node, width) for cpus in _chunks(all_cpus, width)] for node, all_cpus in nodes.items()
    ]
    return [found for found in chain.from_iterable(zip_longest(*by_node)) if found is not None]


def _chunks(cpus: Sequence[int], width: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(cpus) - width + 1, width):
        yield tuple(cpus[start : start + width])


def _what_fits(facts: Facts, width: int, fits: int) -> str:
    groups = Counter((cpu.node, cpu.fast) for cpu in facts.cores)
    hybrid = len({fast for _, fast in groups}) > 1
    found = []
    for (node, fast), count in sorted(groups.items(), key=str):
        kind = "" if not hybrid else " fast" if fast else " efficiency"
        found.append(f"{count}{kind}" + ("" if node is None else f" on node {node}"))
    limit = "" if facts.limits.cpus is None else f", its limit is {facts.limits.cpus:g} CPUs"
    most = f"at most {fits} worker(s) of {width} core(s) fit" if fits else f"no worker of {width} cores fits"
    return (
        f"{most}: this process may use {len(facts.cores)} physical cores ({', '.join(found)}){limit}, "
        "and a worker stays on one node and on cores of one kind"
    )
