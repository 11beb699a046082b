"""Facts and plan for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import orjson

from gristmill_worker.cpus import cpu_model, format_cpu_list
from gristmill_worker.topology.facts import Facts
from gristmill_worker.topology.plan import CoreSet

_NAME_WIDTH = 13


def as_json(facts: Facts, core_sets: Sequence[CoreSet]) -> str:
    """Return both in one JSON object."""
    data = {"cpu": cpu_model(), "facts": facts, "plan": core_sets}
    return orjson.dumps(data, option=orjson.OPT_INDENT_2).decode()


def as_text(facts: Facts, core_sets: Sequence[CoreSet]) -> str:
    """Return both in a few lines."""
    rows = [*_facts(facts), *_plan(core_sets)]
    return "\n".join(f"{name:{_NAME_WIDTH}}{value}" for name, value in rows)


def _facts(facts: Facts) -> Iterator[tuple[str, str]]:
    limits = facts.limits
    yield "CPU", cpu_model()
    cpus = format_cpu_list(cpu.number for cpu in facts.cpus)
    yield (
        "may use",
        f"{len(facts.cpus)} of {facts.online} logical CPUs ({cpus}), {len(facts.cores)} physical cores",
    )
    slow = [cpu for cpu in facts.cores if not cpu.fast]
    if slow and len(slow) < len(facts.cores):
        yield "", f"{len(slow)} of these are efficiency cores: {format_cpu_list(cpu.number for cpu in slow)}"
    if limits.cpus is not None:
        yield "CPU limit", f"{limits.cpus:g} CPUs, says {limits.cpus_file}"
    if limits.memory_bytes is not None:
        yield "memory limit", _gib(limits.memory_bytes)
    if not facts.nodes:
        yield "NUMA", "none" + (f", {_gib(facts.memory_bytes)}" if facts.memory_bytes else "")
    for node in facts.nodes:
        cpus = format_cpu_list(cpu.number for cpu in facts.cpus if cpu.node == node.number)
        usable = "" if node.usable else ", memory not allowed to this process"
        yield f"NUMA node {node.number}", f"CPUs {cpus or 'none'}, {_gib(node.memory_bytes)}{usable}"
    huge = [
        f"{pages.total} of {pages.size_bytes >> 20} MiB set aside ({pages.free} free)"
        for pages in facts.huge_pages
        if pages.total
    ]
    yield "huge pages", ", ".join([f"transparent: {facts.transparent_huge_pages or 'unknown'}", *huge])


def _plan(core_sets: Sequence[CoreSet]) -> Iterator[tuple[str, str]]:
    threads = core_sets[0].threads
    yield "plan", f"{len(core_sets)} worker(s) of {threads} thread(s)"
    for number, core_set in enumerate(core_sets):
        node = "" if core_set.node is None else f" on node {core_set.node}"
        cpus = format_cpu_list(core_set.cpus)
        yield f"  worker {number}", f"CPUs {cpus}{node}: serve --cores {cpus} --threads {core_set.threads}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
