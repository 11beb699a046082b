"""Checks of a worker's settings against the machine: its threads and cores."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill_worker.cpus import format_cpu_list
from gristmill_worker.doctor.finding import Finding, Level
from gristmill_worker.settings import Settings
from gristmill_worker.topology.facts import Facts


def check_cores_and_threads(settings: Settings, facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with ``cores`` and ``threads``, or that nothing is."""
    numbers = settings.cores or tuple(cpu.number for cpu in facts.cpus)
    cpus = [cpu for cpu in facts.cpus if cpu.number in set(numbers)]
    if missing := set(numbers) - {cpu.number for cpu in cpus}:
        listed = format_cpu_list(cpu.number for cpu in facts.cpus)
        fix = f"choose among {listed}, or allow the others (taskset, CPUAffinity, cpuset)"
        found = f"this process may not use CPUs {format_cpu_list(missing)}"
        yield Finding("cores", Level.PROBLEM, found, fix)
        return
    findings = [*_chosen_cores(settings, facts), *_threads(settings, facts)]
    if not findings:
        cores = "all that there are" if settings.cores is None else format_cpu_list(settings.cores)
        findings.append(Finding("threads", Level.OK, f"{settings.threads} on CPUs: {cores}"))
    yield from findings


def _chosen_cores(settings: Settings, facts: Facts) -> Iterator[Finding]:
    """Look at a set of CPUs that somebody wrote down."""
    cpus = [cpu for cpu in facts.cpus if cpu.number in set(settings.cores or ())]
    by_core = {cpu.core: cpu.number for cpu in reversed(cpus)}  # the first of each core
    if len(by_core) < len(cpus):
        found = f"CPUs {format_cpu_list(settings.cores or ())} are only {len(by_core)} physical cores"
        fix = f"cores: {format_cpu_list(by_core.values())}: two threads on a core take turns with its units"
        yield Finding("cores", Level.WARNING, found, fix)
    if len({cpu.node for cpu in cpus}) > 1:
        fix = "give each worker cores of one node: 'gristmill-worker topology' lists them"
        found = f"CPUs {format_cpu_list(settings.cores or ())} belong to several NUMA nodes"
        yield Finding("cores", Level.WARNING, found, fix)
    if len({cpu.fast for cpu in cpus}) > 1:
        fix = "give each worker cores of one kind: every batch waits for the slowest"
        yield Finding("cores", Level.WARNING, "performance and efficiency cores in one worker", fix)


def _threads(settings: Settings, facts: Facts) -> Iterator[Finding]:
    numbers = set(settings.cores or (cpu.number for cpu in facts.cpus))
    cores = len({cpu.core for cpu in facts.cpus if cpu.number in numbers})
    if settings.threads > cores:
        fix = f"threads: {cores}, one for a physical core"
        yield Finding("threads", Level.WARNING, f"{settings.threads} on {cores} physical core(s)", fix)
    quota = facts.limits.cpus
    if quota is not None and settings.threads > max(1, quota):
        fix = f"threads: {max(1, int(quota))}, or a higher limit: batches are stopped in their middle"
        found = f"{settings.threads}, and the control group's limit is {quota:g} CPUs"
        yield Finding("threads", Level.WARNING, found, fix)
