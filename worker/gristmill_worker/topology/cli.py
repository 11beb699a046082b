"""``gristmill-worker topology``."""

from __future__ import annotations

from typing import Literal

import click

from gristmill import console
from gristmill_worker.options import workers_options


@click.command()
@workers_options
@click.option("--json", "as_json", is_flag=True, help="Print all facts and the plan as JSON.")
def topology(
    workers: int | Literal["auto"] | None, cores_per_worker: int | Literal["auto"] | None, as_json: bool
) -> None:
    """Show what this process may use of the machine, and the core set that each worker would get.

    One thread for a physical core, never across a NUMA node, within the limit of the control group.

    \b
    Examples:
      gristmill-worker topology
      taskset -c 0-7 gristmill-worker topology --cores-per-worker 4 --json
    """
    with console.needs_extra("worker"):
        from gristmill_worker.topology import report
        from gristmill_worker.topology.facts import read_facts
        from gristmill_worker.topology.plan import AUTO, plan
    facts = read_facts()
    core_sets = plan(facts, workers=workers or AUTO, cores_per_worker=cores_per_worker or AUTO)
    click.echo(report.as_json(facts, core_sets) if as_json else report.as_text(facts, core_sets))
