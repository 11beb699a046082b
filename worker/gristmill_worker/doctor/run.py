"""All checks, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gristmill_worker.cpus import cpu_features
from gristmill_worker.doctor.broker import check_redis
from gristmill_worker.doctor.finding import Finding
from gristmill_worker.doctor.machine import check_machine
from gristmill_worker.doctor.model import check_model
from gristmill_worker.doctor.worker import check_workers
from gristmill_worker.settings import Settings
from gristmill_worker.topology.facts import read_facts


def examine(configurations: Sequence[Settings], *, model: bool, redis: bool) -> Iterator[Finding]:
    """Yield all findings; ``model`` and ``redis`` say whether the settings name one to look at."""
    facts = read_facts()
    features = cpu_features()
    yield from check_machine(facts, features)
    findings, shares = check_workers(configurations, facts)
    yield from findings
    if model:
        for settings, core_sets in zip(configurations, shares, strict=True):
            threads = core_sets[0].threads if core_sets else settings.threads
            yield from check_model(settings, facts, features, workers=len(core_sets), threads=threads)
    if redis:
        for url in dict.fromkeys(settings.redis for settings in configurations):
            yield from check_redis(url)
