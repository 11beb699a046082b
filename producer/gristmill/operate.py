"""The commands for who runs queues: ``gristmill queue …``, ``gristmill dead …``, ``gristmill cancel``."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gristmill import console
from gristmill.client import Client
from gristmill.console import QUICK_RETRY_S, age, plain, redis_option
from gristmill.control import DeadLetter
from gristmill.core import Depth
from gristmill.errors import ExitCode, NotFoundError


class _ShowByDefault(click.Group):
    """``gristmill queue Q`` is ``gristmill queue show Q``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ShowByDefault)
def queue() -> None:
    """Show queues, pause and resume them, set their bound.

    Without a command: show. A queue that is named like a command is shown with 'gristmill queue show NAME'.
    """


@queue.command("show")
@click.argument("name", metavar="[QUEUE]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@redis_option
def show_queue(name: str | None, as_json: bool, redis: str) -> None:
    """Show what the queues hold and who serves them.

    Waiting requests were not given to a worker yet, pending ones were; dead ones were given up; oldest is the
    age of the oldest request; bound is the number of requests that the queue takes.
    """
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        names = client.queues() if name is None else [name]
        found = [(each, client.depth(each), client.workers(each)) for each in names]
    if as_json:
        records = [{"queue": each, **asdict(depth), "workers": workers} for each, depth, workers in found]
        click.echo(orjson.dumps(records, option=orjson.OPT_INDENT_2))
        return
    numbers = ("waiting", "pending", "dead", "oldest", "bound", "workers")
    table = Table("queue", *(Column(header, justify="right") for header in numbers), "state")
    for each, depth, workers in found:
        held = [f"{count:,}" for count in (depth.waiting, depth.pending, depth.dead)]
        bounds = [age(depth.oldest_s), f"{depth.max_length:,}", str(len(workers))]
        table.add_row(each, *held, *bounds, _state(depth, workers))
    terminal = Console()
    terminal.print(table)
    for each, _, workers in found:
        if workers:
            terminal.print(_workers_table(each, workers))


def _state(depth: Depth, workers: list[dict[str, str]]) -> str:
    return "paused" if depth.paused else "" if workers else "no worker"


def _workers_table(queue: str, workers: list[dict[str, str]]) -> Table:
    columns = ("name", "engine", "model", "task", "requests", "batches")
    headers = (Column(column, overflow="fold") for column in columns)  # a cut name is of no use
    table = Table(*headers, title=f"workers of {queue}", title_justify="left")
    for worker in workers:
        table.add_row(*(Text(plain(worker.get(column, ""), None)) for column in columns))
    return table


@queue.command("pause")
@click.argument("name", metavar="QUEUE")
@redis_option
def pause_queue(name: str, redis: str) -> None:
    """Have the workers take nothing more.

    What they have is finished, and requests are still accepted. It takes effect within two seconds.
    """
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        client.pause(name)
        _say_done(client, name, f"{name} is paused; go on with 'gristmill queue resume {name}'")


@queue.command("resume")
@click.argument("name", metavar="QUEUE")
@redis_option
def resume_queue(name: str, redis: str) -> None:
    """Have the workers of a paused queue go on."""
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        client.resume(name)
        _say_done(client, name, f"{name} goes on")


@queue.command("limit")
@click.argument("name", metavar="QUEUE")
@click.argument("max_length", metavar="N", type=click.IntRange(0, 10**12), required=False)
@click.option("--unset", is_flag=True, help="Leave it to the clients (100,000 if they say nothing).")
@redis_option
def limit_queue(name: str, max_length: int | None, unset: bool, redis: str) -> None:
    """Set how many requests the queue takes, waiting and pending together; what comes then is refused."""
    if (max_length is None) != unset:
        raise click.UsageError("give either N or --unset")
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        client.set_limit(name, max_length)
        _say_done(client, name, f"{name} takes {client.depth(name).max_length:,} requests")


def _say_done(client: Client, name: str, done: str) -> None:
    click.echo(done, err=True)
    if name not in client.queues():
        click.echo(f"note: no request or worker was ever seen on a queue {name!r}", err=True)


@click.group()
def dead() -> None:
    """List, show, retry and delete requests that were given up."""


ids_argument = click.argument("ids", metavar="[ID]...", nargs=-1)


def _chosen(ids: tuple[str, ...], every: bool, *others: object) -> tuple[str, ...] | None:
    """Return the IDs, or None for all letters."""
    if [bool(ids), every, *(other is not None for other in others)].count(True) != 1:
        raise click.UsageError("give either IDs or one of the options that choose letters")
    return ids or None


@dead.command("ls")
@click.argument("queue", metavar="QUEUE")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line instead of a table.")
@redis_option
def list_dead(queue: str, limit: int, as_json: bool, redis: str) -> None:
    """List the dead letters of QUEUE, the oldest first."""
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        letters = client.dead_letters(queue, limit=limit)
    if as_json:
        for letter in letters:
            click.echo(orjson.dumps(_record(letter)))
        return
    table = Table(
        *(Column(name, overflow="fold") for name in ("ID", "reason", "deliveries", "worker", "when"))
    )
    for letter in letters:
        when = datetime.fromtimestamp(letter.died_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        cells = (letter.id or letter.letter, letter.reason, str(letter.deliveries), letter.worker, when)
        table.add_row(*(Text(plain(cell, None)) for cell in cells))
    Console().print(table)
    if len(letters) == limit:
        click.echo("there may be more: see --limit", err=True)


@dead.command("show")
@click.argument("queue", metavar="QUEUE")
@click.argument("letter_id", metavar="ID")
@redis_option
def show_dead(queue: str, letter_id: str, redis: str) -> None:
    """Print one dead letter with its request as JSON."""
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        letters = client.dead_letters(queue, [letter_id])
    if not letters:
        raise NotFoundError(
            f"queue {queue!r} has no dead letter {letter_id!r}: see 'gristmill dead ls {queue}'"
        )
    for letter in letters:
        fields = {_text(name): _text(value) for name, value in letter.fields.items()}
        click.echo(orjson.dumps(_record(letter) | {"fields": fields}, option=orjson.OPT_INDENT_2))


def _record(letter: DeadLetter) -> dict[str, Any]:
    names = ("letter", "id", "reason", "deliveries", "worker", "died_ms", "priority")
    return {name: getattr(letter, name) for name in names}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


@dead.command("retry")
@click.argument("queue", metavar="QUEUE")
@ids_argument
@click.option("--all", "every", is_flag=True, help="Every dead letter.")
@redis_option
def retry_dead(queue: str, ids: tuple[str, ...], every: bool, redis: str) -> int:
    """Queue dead letters again as fresh requests, without their old deadlines.

    Prints what became of each: queued; full (the queue takes no more now); answered (the ID waits again or
    has another result by now); gone (no such letter); unusable (it has no request ID).
    """
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        outcome = client.retry_dead(queue, _chosen(ids, every))
    console.print_outcome(outcome)
    return ExitCode.OK if set(outcome.values()) <= {"queued"} else ExitCode.FAILURE


@dead.command("purge")
@click.argument("queue", metavar="QUEUE")
@ids_argument
@click.option("--all", "every", is_flag=True, help="Every dead letter.")
@click.option("--older-than", type=console.Finite(min=0), metavar="S", help="Those that died S seconds ago.")
@redis_option
def purge_dead(queue: str, ids: tuple[str, ...], every: bool, older_than: float | None, redis: str) -> int:
    """Delete dead letters and print how many."""
    chosen = _chosen(ids, every, older_than)
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        count = client.purge_dead(queue, chosen, older_than_s=older_than)
    click.echo(count)
    return ExitCode.FAILURE if count < len(set(ids)) else ExitCode.OK


@click.command()
@click.argument("queue", metavar="QUEUE")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@redis_option
def cancel(queue: str, ids: tuple[str, ...], redis: str) -> int:
    """Cancel requests that have no result yet.

    Prints the status that each has now: cancelled; ok, error, expired or done: too late; unknown: never
    submitted, or its result was not kept.
    """
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        outcome = client.cancel(queue, *ids)
    console.print_outcome(outcome)
    return ExitCode.OK if set(outcome.values()) == {"cancelled"} else ExitCode.FAILURE
