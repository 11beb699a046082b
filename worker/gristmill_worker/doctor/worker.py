"""Checks of a configuration against the machine: do its workers fit, and how many are they?"""

from __future__ import annotations

from gristmill.errors import InputFileError
from gristmill_worker.cpus import format_cpu_list
from gristmill_worker.doctor.finding import Finding, Level
from gristmill_worker.settings import Settings
from gristmill_worker.supervisor.shares import Wish, share_cores
from gristmill_worker.topology.facts import Facts
from gristmill_worker.topology.plan import CoreSet


def check_workers(settings: Settings, facts: Facts) -> tuple[Finding, list[CoreSet]]:
    """Return what 'run' would give to each worker, and what is to be said of it; [] where nothing fits."""
    usable = [cpu.number for cpu in facts.cpus]
    if missing := set(settings.cores or ()) - set(usable):
        fix = f"choose among {format_cpu_list(usable)}, or allow the others (taskset, CPUAffinity, cpuset)"
        found = f"cores: this process may not use CPUs {format_cpu_list(missing)}"
        return Finding("workers", Level.PROBLEM, found, fix), []
    try:
        wish = Wish(settings.workers, settings.cores_for_one, settings.cores)
        core_sets = share_cores(facts, [wish])[0]
    except InputFileError as error:
        fix = "ask for less; 'gristmill-worker topology' shows what there is"
        return Finding("workers", Level.PROBLEM, str(error), fix), []
    cpus = format_cpu_list(cpu for core_set in core_sets for cpu in core_set.cpus)
    found = f"{len(core_sets)} of {core_sets[0].threads} thread(s), on CPUs {cpus}"
    by_number = {cpu.number: cpu for cpu in facts.cpus}
    if len({by_number[cpu].fast for core_set in core_sets for cpu in core_set.cpus}) > 1:
        fix = "fewer workers: texts that an efficiency core takes wait two or three times as long"
        found += ", some of them on efficiency cores"
        return Finding("workers", Level.WARNING, found, fix), core_sets
    return Finding("workers", Level.OK, found), core_sets
