"""``gristmill-worker tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console

from gristmill import console
from gristmill_worker.options import cpu_list, variant_options

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@variant_options
@click.option(
    "--cores",
    callback=cpu_list,
    metavar="LIST",
    help="CPUs to use, e.g. 0,2-3.  [default: all that this process may use]",
)
@click.option(
    "--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Threads of the engine."
)
@click.option(
    "--texts", type=_FILE, help="CSV or JSONL file of real texts.  [default: Python's documentation]"
)
@click.option("--text-column", default="text", show_default=True, help="Column of the texts.")
@click.option(
    "--seconds",
    default=150.0,
    show_default=True,
    type=console.Finite(min=0, min_open=True),
    help="Time for measuring.",
)
@click.option(
    "--max-shapes",
    type=click.IntRange(min=1),
    help="Shapes to choose at most.  [default: 32, or 16 where a change of shape is dear]",
)
@click.option(
    "--latency-ms",
    type=console.Finite(min=0, min_open=True),
    help="Also recommend for 95 % of texts within this time.",
)
@click.option("--png", type=_FILE, help="Draw the costs into this file.")
@click.option("--json", "json_path", type=_FILE, help="Write all figures to this file.")
def tune(
    engine: str | None,
    form: str | None,
    precision: Literal["auto", "fp32", "bf16"] | None,
    json_path: Path | None,
    png: Path | None,
    **options: Any,
) -> None:
    """Measure a model on this CPU and recommend how to run it.

    Times batches of many shapes, stores the costs in the model directory MODEL, where workers on the same CPU
    model with the same engine and threads find them, and recommends the shapes, the window and the threads.
    Real texts matter: their lengths decide. The machine should have nothing else to do.

    \b
    Examples:
      gristmill-worker tune models/minilm --cores 0
      gristmill-worker tune models/minilm --texts tickets.csv --text-column body --latency-ms 100
    """
    with console.needs_extra("worker"):
        from gristmill_worker.engines.choice import AUTO, Wanted
        from gristmill_worker.tune import report as tune_report
        from gristmill_worker.tune.run import TuneOptions
        from gristmill_worker.tune.run import tune as run
    for path in (json_path, png):
        if path is not None:
            console.check_writable(path)
    if png is not None:
        tune_report.check_png()
    terminal = Console()
    with Console(stderr=True).status("starting") as status:
        wanted = Wanted(engine or AUTO, form or AUTO, precision or "auto")
        report = run(TuneOptions(wanted=wanted, **options), say=status.update)
    tune_report.print_report(terminal, report)
    for recommendation in report.recommendations:
        # Not through the console, which would wrap the lines.
        click.echo(f"\n# for {recommendation.goal}")
        click.echo(tune_report.yaml_snippet(report, recommendation), nl=False)
    if json_path is not None:
        tune_report.write_json(report, json_path)
    if png is not None:
        tune_report.write_png(report, png)
