"""The command line ``gristmill``: score files, submit requests, fetch results, look at queues."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NoReturn

import click
import orjson

from gristmill import __version__, console, operate, wire
from gristmill.bulk.cli import score
from gristmill.bulk.shards.cli import bulk
from gristmill.calls import CallKeywords, Item
from gristmill.client import Client
from gristmill.console import QUICK_RETRY_S, redis_option
from gristmill.errors import (
    ExitCode,
    InvalidRequestError,
    QueueFull,
)
from gristmill.top import top

SUBMIT_LINES: Final = 1000  # of standard input, at a time


@click.group(epilog=console.EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gristmill")
def cli() -> None:
    """Score texts with transformer models on CPUs, through Redis queues."""


@cli.command()
@click.argument("queue")
@click.argument("text", required=False)
@click.option("--pair", metavar="TEXT", help="Second text of a pair.")
@click.option("--id", "request_id", metavar="ID", help="The request's ID; submitted twice, it runs once.")
@click.option("--json", "body", metavar="BODY", help="The whole request body as a JSON object.")
@click.option(
    "--ttl", type=click.IntRange(1, wire.MAX_TTL_S), metavar="S", help="Seconds to keep the result."
)
@click.option("--deadline-ms", type=click.IntRange(min=1), metavar="MS", help="Drop it if not run by then.")
@click.option(
    "--wait",
    type=console.Finite(min=0),
    default=0,
    show_default=True,
    metavar="S",
    help="Seconds to wait for room in a full queue.",
)
@console.priority_option
@redis_option
def submit(
    queue: str,
    text: str | None,
    pair: str | None,
    request_id: str | None,
    body: str | None,
    redis: str,
    **given: Any,
) -> None:
    """Queue TEXT (or with "-" each line of standard input) and print the request IDs.

    Fetch the results with 'gristmill result'.
    """
    if (text is None) == (body is None):
        raise click.UsageError("give either TEXT or --json BODY")
    if pair is not None and text in (None, "-"):
        raise click.UsageError("--pair goes with one TEXT")
    if request_id is not None and text == "-":
        raise click.UsageError("--id goes with one TEXT")
    items: Iterator[Item]
    if text is None:
        items = iter([_body(body or "")])
    elif text == "-":
        items = _lines()
    else:
        items = iter([text if pair is None else (text, pair)])
    call: CallKeywords = {
        "ttl_s": given["ttl"],
        "deadline_s": None if given["deadline_ms"] is None else given["deadline_ms"] / 1000,
        "priority": given["priority"],
        "wait_s": given["wait"],
    }
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        while batch := list(islice(items, SUBMIT_LINES)):
            ids = None if request_id is None else [request_id]
            try:
                queued = client.submit_many(queue, batch, ids=ids, reply=False, **call)
            except QueueFull as error:
                click.echo("\n".join(error.accepted))
                raise
            click.echo("\n".join(queued))


def _lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise InvalidRequestError(f"line {number} of standard input is not valid UTF-8") from None
        if text:
            yield text


def _body(text: str) -> dict[str, Any]:
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise click.BadParameter(f"not valid JSON: {error}", param_hint="--json") from error
    if not isinstance(body, dict):
        raise click.BadParameter("it has to be a JSON object", param_hint="--json")
    return body


@cli.command()
@click.argument("queue")
@click.argument("request_id", metavar="ID")
@click.option(
    "--timeout",
    type=console.Finite(min=0),
    default=30,
    show_default=True,
    metavar="S",
    help="Seconds to wait.",
)
@redis_option
def result(queue: str, request_id: str, timeout: float, redis: str) -> int:
    """Wait for the result of request ID and print it as JSON."""
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        found = client.result(request_id, timeout, queue=queue)
    click.echo(wire.encode_result(found))
    return ExitCode.OK if found.ok else ExitCode.REQUEST_FAILED


cli.add_command(score)
cli.add_command(bulk)
cli.add_command(operate.queue)
cli.add_command(operate.dead)
cli.add_command(operate.cancel)
cli.add_command(top)


def main() -> NoReturn:
    """Entry point of ``gristmill``."""
    console.run(cli)


if __name__ == "__main__":
    main()
