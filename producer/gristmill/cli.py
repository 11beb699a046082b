"""The command line ``gristmill``: score files, submit requests, fetch results, look at queues."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Final, NoReturn

import click
import orjson
from click.core import ParameterSource
from rich.console import Console

from gristmill import __version__, console, operate, wire
from gristmill.bulk import Job, score_file
from gristmill.bulk.display import preview_table, print_summary, progress_bar
from gristmill.bulk.score import served_task
from gristmill.calls import CallKeywords, Item
from gristmill.client import Client
from gristmill.console import QUICK_RETRY_S, redis_option
from gristmill.core import MAX_WINDOW
from gristmill.embedded import PrivateRedis, PrivateWorkers
from gristmill.errors import (
    ExitCode,
    InputFileError,
    InvalidRequestError,
    NoWorkerError,
    QueueFull,
)
from gristmill.top import top

PRIVATE_QUEUE: Final = "score"
SUBMIT_LINES: Final = 1000  # of standard input, at a time


@click.group(epilog=console.EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gristmill")
def cli() -> None:
    """Score texts with transformer models on CPUs, through Redis queues."""


def _delimiter(_: click.Context, __: click.Parameter, value: str) -> str:
    value = "\t" if value in ("\\t", "tab") else value
    if len(value) != 1 or value in '"\r\n':
        raise click.BadParameter("use one character, or \\t for a tab")
    return value


@cli.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write: .csv or .jsonl.")
@click.option("--text-column", required=True, metavar="C", help="Column with the text.")
@click.option("--pair-column", metavar="C", help="Column with the second text of a pair.")
@redis_option
@click.option("--queue", metavar="Q", help="Queue of running workers at --redis.")
@click.option("--model", metavar="DIR", type=click.Path(path_type=Path), help="Model to run here instead.")
@click.option("--workers", type=click.IntRange(min=1), help="Workers to start for --model.  [default: 1]")
@click.option("--threads", type=click.IntRange(min=1), help="Engine threads of each such worker.")
@click.option("--top-k", type=click.IntRange(min=0), default=1, show_default=True, help="Labels; 0: all.")
@click.option("--truncate/--no-truncate", default=True, show_default=True, help="Cut too long texts.")
@console.priority_option
@click.option(
    "--window", type=click.IntRange(1, MAX_WINDOW), default=1024, show_default=True, help="Rows in flight."
)
@click.option("--prefix", default="gm_", show_default=True, help="Of the result columns' names.")
@click.option("--delimiter", default=",", show_default=True, callback=_delimiter, help="Of CSV files.")
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
@click.option("--preview", type=click.IntRange(min=0), default=0, metavar="N", help="Print the first N rows.")
@click.option(
    "--wait",
    type=console.Finite(min=0),
    default=30,
    show_default=True,
    metavar="S",
    help="Seconds to wait for a worker of --queue, also during the run.",
)
@click.option("--quiet", is_flag=True, help="No progress bar and no summary.")
def score(
    redis: str,
    model: Path | None,
    workers: int | None,
    threads: int | None,
    wait: float,
    quiet: bool,
    **given: Any,
) -> int:
    """Score every row of IN, a .csv or .jsonl file ("-": standard input in the output's format).

    The output has the input's columns and the results: gm_label and gm_score, or gm_embedding, and gm_error,
    which is empty where all went well. Rows are written to OUT.part, which becomes OUT at the end.

    Uses the running workers of --queue at --redis, or with --model starts a Redis and workers for this run.
    """
    if (model is None) == (given["queue"] is None):
        raise click.UsageError("give either --queue (running workers) or --model (workers for this run)")
    context = click.get_current_context()
    if model is not None and context.get_parameter_source("redis") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--model starts its own Redis: --redis goes with --queue")
    if model is None and (workers or threads):
        raise click.UsageError("--workers and --threads go with --model")
    job = Job(**{**given, "queue": given["queue"] or PRIVATE_QUEUE, "wait": wait})
    job.check()  # whatever is wrong with the files is said before a model is loaded
    terminal = Console(stderr=True, quiet=quiet)
    with ExitStack() as stack:
        with terminal.status("waiting for a worker" if model is None else "loading the model"):
            if model is None:
                client = _running_workers(stack, redis, job.queue, wait)
            else:
                client = _private_workers(stack, model, workers or 1, threads)
        with progress_bar(terminal) as on_progress:
            summary = score_file(client, job, on_progress)
    if summary.preview:
        screen = Console()
        screen.print(preview_table(summary.preview, screen.width))
    print_summary(terminal, summary, job.out)
    return ExitCode.ROWS_FAILED if summary.failed else ExitCode.OK


def _private_workers(stack: ExitStack, model: Path, count: int, threads: int | None) -> Client:
    if not model.is_dir():
        raise InputFileError(
            f"{model} is not a model directory: make one with 'gristmill-worker model import'"
        )
    redis = stack.enter_context(PrivateRedis())
    stack.enter_context(PrivateWorkers(model, PRIVATE_QUEUE, redis, count=count, threads=threads))
    # A private Redis never comes back: a long retry would only delay the error.
    return stack.enter_context(Client(redis.url, retry_s=1.0))


def _running_workers(stack: ExitStack, redis: str, queue: str, wait_s: float) -> Client:
    ends = time.monotonic() + wait_s
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        while True:
            try:
                served_task(client, queue)
            except NoWorkerError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.2)
            else:
                return stack.enter_context(Client(redis))


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


cli.add_command(operate.queue)
cli.add_command(operate.dead)
cli.add_command(operate.cancel)
cli.add_command(top)


def main() -> NoReturn:
    """Entry point of ``gristmill``."""
    console.run(cli)


if __name__ == "__main__":
    main()
