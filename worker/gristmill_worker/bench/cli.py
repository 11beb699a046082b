"""``gristmill-worker bench``: what one worker core reaches, and where its time goes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import orjson
from rich.console import Console

from gristmill import console
from gristmill.errors import InputFileError
from gristmill_worker.options import variant_options
from gristmill_worker.topology.facts import read_facts

COUNT: Final = 800


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@variant_options
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Of the engine. More than 1 are refused: the worker has one CPU.",
)
@click.option(
    "--core", type=click.IntRange(min=0), metavar="N", help="The worker's CPU.  [default: the first]"
)
@click.option(
    "--other-core",
    type=click.IntRange(min=0),
    metavar="N",
    help="CPU of Redis and the producer.  [default: one of another physical core]",
)
@click.option(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=".csv or .jsonl file of texts.  [default: paragraphs of Python's documentation]",
)
@click.option("--text-column", metavar="C", help="Column with the texts.")
@click.option(
    "--count", type=click.IntRange(min=100), default=COUNT, show_default=True, help="Texts to score."
)
@click.option("--rounds", type=click.IntRange(min=1), help="Alternated rounds.  [default: 3]")
@click.option(
    "--seconds-per-load",
    type=console.Finite(min=0, min_open=True),
    metavar="S",
    help="Of each load of the open loop.  [default: 8]",
)
@click.option("--json", type=click.Path(path_type=Path), help="File to write all figures to.")
@click.option("--png", type=click.Path(path_type=Path), help="File to draw the open loop to.")
@click.option("--quick", is_flag=True, help="Measure little, to see that all of it works.")
def bench(model: Path, texts: Path | None, text_column: str | None, quick: bool, **given: Any) -> None:
    """Measure the model directory MODEL on one core of this machine.

    Throughput of the engine alone, through Redis and with FIFO batches; CPU time by stage; the queue's own
    limit with an engine that computes nothing; latency when idle, in bursts and under Poisson arrivals.
    Starts a Redis and workers of its own. Nothing else should run on the machine meanwhile.

    \b
    Example:
      gristmill-worker bench models/minilm --json bench.json --png bench.png
    """
    if texts is not None and text_column is None:
        raise click.UsageError("--texts goes with --text-column")
    if given["threads"] > 1:
        raise InputFileError(
            f"--threads {given['threads']}: bench measures a worker on one CPU, where they would wait for "
            "each other; 'gristmill-worker tune' compares threads with workers"
        )
    with console.needs_extra("worker"):
        from gristmill_worker.bench import report as bench_report
        from gristmill_worker.bench.figures import measure
        from gristmill_worker.bench.throughput import QUICK, Amounts, prepare, read_texts, split
        from gristmill_worker.engines.choice import AUTO, Wanted
    for path in (given["json"], given["png"]):
        if path is not None:
            console.check_writable(path)
    if given["png"] is not None:
        bench_report.check_png()
    amounts = QUICK if quick else Amounts()
    changed = {name: given[name] for name in ("rounds", "seconds_per_load") if given[name]}
    cores = choose_cores(given["core"], given["other_core"])
    wanted = Wanted(given["engine"] or AUTO, given["form"] or AUTO, given["precision"] or "auto")
    measured, sample = split(read_texts(texts, text_column), given["count"])
    say = Progress()
    subject = prepare(model, wanted, given["threads"], cores, measured, sample)
    source = str(texts or "Python's documentation, by paragraphs")
    report = measure(subject, replace(amounts, **changed), source, say)
    say("done")
    bench_report.show(Console(), report)
    if given["json"] is not None:
        given["json"].write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    if given["png"] is not None:
        bench_report.write_png(report, given["png"])


class Progress:
    """Says on standard error what is done, and since how many seconds."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, message: str) -> None:
        click.echo(f"{time.monotonic() - self._started:4.0f} s  {message}", err=True)


def choose_cores(core: int | None, other: int | None) -> tuple[int, int]:
    """Return the worker's CPU and that of the rest, by default on different physical cores if there are two.

    Raises InputFileError for a CPU that this process may not use.
    """
    core_of = {cpu.number: cpu.core for cpu in read_facts().cpus}
    for given in (core, other):
        if given is not None and given not in core_of:
            raise InputFileError(f"CPU {given} cannot be used: this process may use {list(core_of)}")
    first = min(core_of) if core is None else core
    if other is None:
        # Another physical core, else another CPU, else the same.
        other = min(core_of, key=lambda cpu: (core_of[cpu] == core_of[first], cpu == first))
    return first, other
