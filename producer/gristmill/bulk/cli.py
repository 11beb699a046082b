"""``gristmill score``: its options, its workers, what it prints."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click
from click.core import ParameterSource
from rich.console import Console

from gristmill import console, start
from gristmill.bulk import options
from gristmill.bulk.display import preview_table, print_summary, progress_bar
from gristmill.bulk.files import STANDARD_STREAM
from gristmill.bulk.job import Job, Plan
from gristmill.bulk.score import Stop, score_file, wait_for_model
from gristmill.client import Client
from gristmill.console import QUICK_RETRY_S, redis_option
from gristmill.embedded import PrivateRedis, PrivateWorkers
from gristmill.errors import ExitCode, InputFileError

PRIVATE_QUEUE: Final = "score"


@click.command()
@options.sources
@options.output
@options.rows
@redis_option
@click.option("--queue", metavar="Q", help="Queue of running workers at --redis.")
@click.option("--model", metavar="DIR", type=click.Path(path_type=Path), help="Model to run here instead.")
@click.option("--workers", type=click.IntRange(min=1), help="Workers to start for --model.  [default: 1]")
@click.option("--threads", type=click.IntRange(min=1), help="Engine threads of each such worker.")
@click.option("--preview", type=click.IntRange(min=0), default=0, metavar="N", help="Print the first N rows.")
@click.option(
    "--cost-per-hour",
    type=console.Finite(min=0),
    metavar="X",
    help="Of the machines: print what a million costs.",
)
@click.option("--quiet", is_flag=True, help="No progress bar and no summary.")
def score(
    redis: str,
    model: Path | None,
    workers: int | None,
    threads: int | None,
    wait: float,
    cost_per_hour: float | None,
    quiet: bool,
    **given: Any,
) -> int:
    """Score every row of IN: files, globs, URLs, or "-" for standard input.

    Formats are .csv, .tsv, .jsonl (each also .gz or .zst) and .parquet. The output has the input's columns
    and the results: gm_label and gm_score, or gm_embedding, and gm_error, empty where all went well.

    Parts and checkpoints are kept in OUT.parts until OUT is whole. Interrupted, killed or cut off, the same
    command goes on where it was. The first Ctrl-C finishes what is in flight.

    Uses the running workers of --queue at --redis, or with --model starts a Redis and workers for this run.
    """
    if (model is None) == (given["queue"] is None):
        raise click.UsageError("give either --queue (running workers) or --model (workers for this run)")
    context = click.get_current_context()
    if model is not None and context.get_parameter_source("redis") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--model starts its own Redis: --redis goes with --queue")
    if model is None and (workers or threads):
        raise click.UsageError("--workers and --threads go with --model")
    streamed = given["out"] == STANDARD_STREAM
    if streamed and (given["preview"] or given["parts"]):
        raise click.UsageError("--preview and --parts do not go with standard output")
    job = Job(**{**given, "queue": given["queue"] or PRIVATE_QUEUE, "wait": wait})
    plan = Plan(job)  # whatever is wrong with the files is said before a model is loaded
    terminal = Console(stderr=True, quiet=quiet)
    with ExitStack() as stack:
        with terminal.status("waiting for a worker" if model is None else "loading the model"):
            if model is None:
                client = _running_workers(stack, redis, job.queue, wait)
            else:
                client = _private_workers(stack, model, workers or 1, threads)
        stop = stack.enter_context(_first_signal(terminal)) if not (plan.piped or plan.streamed) else _never
        tell = partial(_tell_of_earlier, terminal, plan)
        try:
            with progress_bar(terminal) as on_progress:
                summary = score_file(client, job, on_progress, stop=stop, on_earlier=tell)
        except BaseException as error:
            if not (plan.piped or plan.streamed or isinstance(error, InputFileError)):
                error.add_note(f"to go on: {resume_command()}")
            raise
    if summary.preview:
        screen = Console()
        screen.print(preview_table(summary.preview, screen.width))
    rejects = None if streamed and job.rejects is None else plan.rejects
    print_summary(terminal, summary, plan.out, rejects=rejects, cost_per_hour=cost_per_hour)
    return ExitCode.ROWS_FAILED if summary.failed else ExitCode.OK


def resume_command() -> str:
    """Return the command line to go on with: what was typed, without --force, which starts afresh."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return shlex.join(word for word in words if word != "--force")


def _tell_of_earlier(terminal: Console, plan: Plan, rows: int) -> None:
    if plan.piped:
        terminal.out(f"standard input cannot be resumed: {plan.folder} is started afresh", highlight=False)
    else:
        terminal.out(f"going on after {rows:,} rows that are in {plan.folder}", highlight=False)


def _never() -> bool:
    return False


@contextmanager
def _first_signal(terminal: Console) -> Iterator[Stop]:
    """Tell of the first SIGINT, SIGTERM or SIGHUP; the second interrupts as usual."""
    seen: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        terminal.out("finishing what is in flight; once more to stop at once", highlight=False)

    start.on_interruption(on_signal)
    try:
        yield lambda: bool(seen)
    finally:
        start.on_interruption(signal.default_int_handler)


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
    with Client(redis, retry_s=QUICK_RETRY_S) as client:
        wait_for_model(client, queue, wait_s)
    return stack.enter_context(Client(redis))
