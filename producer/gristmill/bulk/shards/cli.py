"""``gristmill bulk``: score files with RQ jobs on many machines."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill import console
from gristmill.bulk import options
from gristmill.bulk.job import Job
from gristmill.console import plain, redis_option
from gristmill.errors import ExitCode

if TYPE_CHECKING:
    from gristmill.bulk.shards.runs import RunStatus, ShardStatus

LOOK_EVERY_S: Final = 1.0


@click.group()
def bulk() -> None:
    """Score files with RQ jobs on many machines."""


def _seconds(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    words = value.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise click.BadParameter("use whole seconds, joined with commas: 0 or 10,60,300")
    return tuple(map(int, words))


@bulk.command()
@options.sources
@options.output
@options.rows
@redis_option
@click.option("--queue", metavar="Q", required=True, help="Queue of running workers at --redis.")
@click.option("--shards", type=click.IntRange(min=1), required=True, metavar="N", help="Jobs to cut it into.")
@click.option("--rq-queue", default="gristmill-bulk", show_default=True, metavar="Q", help="RQ's queue.")
@click.option(
    "--retries", type=click.IntRange(min=0), default=5, show_default=True, help="Of a job that fails."
)
@click.option(
    "--retry-after",
    "intervals",
    default="0",
    show_default=True,
    metavar="S,…",
    callback=_seconds,
    help="Seconds before each retry; more than 0 needs an 'rq worker --with-scheduler'.",
)
@click.option(
    "--work",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder that the jobs share.  [default: OUT.shards]",
)
def submit(
    redis: str,
    shards: int,
    rq_queue: str,
    retries: int,
    intervals: tuple[int, ...],
    work: Path | None,
    **given: Any,
) -> None:
    """Enqueue the scoring of IN as RQ jobs: one for each shard, and one that makes OUT of all.

    Plain RQ workers run them, on any machine that has IN and OUT under the same path, with GRISTMILL_REDIS
    set: 'rq worker -S rq.serializers.JSONSerializer gristmill-bulk'. The output is what 'gristmill score'
    writes. A shard is some parts of --part-rows rows. The same command again goes on where a failed or
    cancelled run was.
    """
    from gristmill.bulk.shards.submit import How
    from gristmill.bulk.shards.submit import submit as enqueue

    job = Job(**{**given, "source": [*given["source"]]})
    how = How(shards, rq_queue, retries, intervals, work)
    with Console(stderr=True).status("reading the inputs to find where shards begin"):
        run = enqueue(redis, job, how)
    click.echo(run.id)
    done = f", {run.done_before:,} were done before" if run.done_before else ""
    few = f" (more need a smaller --part-rows than {job.part_rows:,})" if len(run.shards) < shards else ""
    click.echo(f"{run.total:,} rows in {len(run.shards)} shards{few}{done}", err=True)


@bulk.command()
@click.argument("run", metavar="JOB|OUT")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--wait", type=console.Finite(min=0), default=0, metavar="S", help="Seconds to wait for its end."
)
@redis_option
def status(run: str, redis: str, wait: float, *, as_json: bool) -> int:
    """Say how far a run is. JOB is what submit printed, OUT the run's output.

    Exit codes: 0 it is done, 3 so it is and some rows carry an error, 1 it failed, 130 it was cancelled,
    11 it waits or runs.
    """
    from gristmill.bulk.shards import runs

    ends = time.monotonic() + wait
    found = runs.status(redis, run)
    while found.exit_code is ExitCode.UNFINISHED and time.monotonic() < ends:
        time.sleep(min(LOOK_EVERY_S, max(ends - time.monotonic(), 0)))
        found = runs.status(redis, run)
    _print(found, as_json=as_json)
    return found.exit_code


@bulk.command()
@click.argument("run", metavar="JOB|OUT")
@redis_option
def cancel(run: str, redis: str) -> None:
    """Cancel the jobs of a run that wait, and stop those that run. Parts that are done are kept."""
    from gristmill.bulk.shards import runs

    found = runs.cancel(redis, run)
    if found.state == "finished":
        click.echo(f"{found.out} is finished already")
        return
    click.echo(f"cancelled: {found.out}; to go on with it, submit it again with the same arguments")


def _print(run: RunStatus, *, as_json: bool) -> None:
    if as_json:
        fields = {**asdict(run), "rows": run.rows, "total": run.total}
        click.echo(orjson.dumps(fields).decode())
        return
    click.echo(f"{run.id} {run.state}: {run.rows:,} of {run.total:,} rows of {plain(run.out, None)}")
    table = Table()
    for name in ("shard", "status", "rows", "of", "rows/s", "errors", "worker", "reason"):
        table.add_column(name, justify="right" if name in ("rows", "of", "rows/s", "errors") else "left")
    for one in (*run.shards, run.merge):
        table.add_row(*map(Text, _cells(one)))
    Console(width=None if Console().is_terminal else 200).print(table)
    if run.state in ("failed", "cancelled"):
        click.echo("to go on with it, submit it again with the same arguments")


def _cells(one: ShardStatus) -> tuple[str, ...]:
    if one.number is None:
        return ("merge", one.status, "", "", "", "", "", plain(one.reason or "", None))
    return (
        str(one.number),
        one.status,
        f"{one.rows:,}",
        f"{one.total:,}",
        f"{one.rows_per_s:,.0f}" if one.worker else "",
        f"{sum(one.errors.values()):,}",
        plain(one.worker or ""),
        plain(one.reason or "", None),
    )
