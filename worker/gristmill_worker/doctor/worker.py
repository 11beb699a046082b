"""Checks of configurations against the machine: do their workers fit, and how many are they?"""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.errors import InputFileError
from gristmill_worker.cpus import format_cpu_list
from gristmill_worker.doctor.finding import Finding, Level
from gristmill_worker.settings import Settings
from gristmill_worker.supervisor.shares import Wish, share_cores
from gristmill_worker.topology.facts import Facts
from gristmill_worker.topology.plan import CoreSet


def check_workers(
    configurations: Sequence[Settings], facts: Facts
) -> tuple[list[Finding], list[list[CoreSet]]]:
    """Return what is to be said of each, and what 'run' would give to its workers; [] where nothing fits."""
    usable = [cpu.number for cpu in facts.cpus]
    findings = []
    for settings in configurations:
        if missing := set(settings.cores or ()) - set(usable):
            fix = (
                f"choose among {format_cpu_list(usable)}, or allow the others (taskset, CPUAffinity, cpuset)"
            )
            found = f"cores: this process may not use CPUs {format_cpu_list(missing)}"
            findings.append(Finding("workers", Level.PROBLEM, found, fix))
    try:
        wishes = [Wish(each.workers, each.cores_for_one, each.cores) for each in configurations]
        shares = share_cores(facts, wishes) if not findings else []
    except InputFileError as error:
        fix = "ask for less; 'gristmill-worker topology' shows what there is"
        findings.append(Finding("workers", Level.PROBLEM, str(error), fix))
    if findings:
        return findings, [[] for _ in configurations]
    return [_judge(core_sets, facts) for core_sets in shares], shares


def _judge(core_sets: Sequence[CoreSet], facts: Facts) -> Finding:
    numbers = [cpu for core_set in core_sets for cpu in core_set.cpus]
    found = f"{len(core_sets)} of {core_sets[0].threads} thread(s), on CPUs {format_cpu_list(numbers)}"
    if len({cpu.fast for cpu in facts.cpus if cpu.number in set(numbers)}) > 1:
        fix = "fewer workers: texts that an efficiency core takes wait two or three times as long"
        return Finding("workers", Level.WARNING, f"{found}, some of them on efficiency cores", fix)
    return Finding("workers", Level.OK, found)
