"""How the models of one machine divide its cores: a pure function of the facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gristmill.errors import InputFileError
from gristmill_worker.topology.facts import Facts
from gristmill_worker.topology.plan import AUTO, Auto, CoreSet, plan


@dataclass(frozen=True, slots=True)
class Wish:
    """What one configuration asks for; ``cores`` are the CPUs that it may use, None for all."""

    workers: int | Auto = AUTO
    cores_per_worker: int | Auto = AUTO
    cores: tuple[int, ...] | None = None


def share_cores(facts: Facts, wishes: Sequence[Wish]) -> list[list[CoreSet]]:
    """Return the core sets of each configuration.

    Those that name a number of workers get theirs first; the others divide what is left evenly. Where nothing
    is left for one, it gets a single worker on cores that others have too. Raises InputFileError for a number
    of workers that does not fit, and for CPUs that may not be used.
    """
    for wish in wishes:
        if unknown := {*(wish.cores or ())} - {cpu.number for cpu in facts.cpus}:
            raise InputFileError(f"cores: this process may not use {', '.join(map(str, sorted(unknown)))}")
    found: list[list[CoreSet]] = [[] for _ in wishes]
    left = facts
    for i, wish in enumerate(wishes):
        if wish.workers != AUTO:
            allowed = _within(left, wish.cores)
            if not allowed.cores and left is not facts:
                raise InputFileError(
                    f"workers: {wish.workers}: the other configurations leave no core for this one: let them "
                    "have fewer workers, or let this one have 'auto', which shares a core where none is left"
                )
            found[i] = plan(allowed, workers=wish.workers, cores_per_worker=wish.cores_per_worker)
            left = _without(left, found[i])
    open_ones = [i for i, wish in enumerate(wishes) if wish.workers == AUTO]
    for position, i in enumerate(open_ones):
        sets = _fitting(_within(left, wishes[i].cores), wishes[i])
        threads = sum(each.threads for each in sets)
        share = threads // (len(open_ones) - position)  # in cores: some take several for a worker
        found[i] = [each for k, each in enumerate(sets) if k == 0 or (k + 1) * each.threads <= share]
        left = _without(left, found[i])
    for position, i in enumerate(i for i in open_ones if not found[i]):
        sets = plan(_within(facts, wishes[i].cores), cores_per_worker=wishes[i].cores_per_worker)
        found[i] = [sets[position % len(sets)]]
    return found


def _fitting(facts: Facts, wish: Wish) -> list[CoreSet]:
    """Return all core sets that are free, [] if there is none."""
    width = 1 if wish.cores_per_worker == AUTO else wish.cores_per_worker
    try:
        return plan(facts, cores_per_worker=width) if facts.cores else []
    except InputFileError:  # not one of this width
        return []


def _within(facts: Facts, cores: Sequence[int] | None) -> Facts:
    if cores is None:
        return facts
    return replace(facts, cpus=tuple(cpu for cpu in facts.cpus if cpu.number in set(cores)))


def _without(facts: Facts, taken: Sequence[CoreSet]) -> Facts:
    """Take whole cores away, SMT siblings too, and their part of a quota: less than one CPU of it is none."""
    numbers = {number for each in taken for number in each.cpus}
    cores = {cpu.core for cpu in facts.cpus if cpu.number in numbers}
    cpus = tuple(cpu for cpu in facts.cpus if cpu.core not in cores)
    limits = facts.limits
    if limits.cpus is not None and taken:
        quota = limits.cpus - sum(each.threads for each in taken)
        limits = replace(limits, cpus=quota)
        cpus = cpus if quota >= 1 else ()
    return replace(facts, cpus=cpus, limits=limits)
