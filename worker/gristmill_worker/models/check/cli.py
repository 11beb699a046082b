"""``gristmill-worker model check``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.console import Console

from gristmill import console
from gristmill.errors import ExitCode
from gristmill_worker.models.limits import LIMITS, limits_table
from gristmill_worker.options import Command, cpu_list, variant_options

if TYPE_CHECKING:
    from gristmill_worker.models.labelled import Labelled, ScoredPairs

_FILE = click.Path(dir_okay=False, path_type=Path)
_EPILOG = "\b\nLimits, by what was done to the numbers (pruned forms count as quantized):\n" + limits_table()


def _limit(flag: str, text: str) -> Callable[[Command], Command]:
    help_text = f"{text}  [default: by kind, see below]"
    return click.option(flag, type=console.Finite(min=0), help=help_text)


@click.command(epilog=_EPILOG)
@click.argument("model", type=click.Path(path_type=Path))
@variant_options
@click.option("--texts", type=_FILE, help="Texts to compare on.  [default: Python's documentation]")
@click.option("--data", type=_FILE, help="Labelled rows, for the task's metric (.csv, .tsv or .jsonl).")
@click.option("--text-column", default="text", show_default=True, help="Column of --texts and --data.")
@click.option("--label-column", default="label", show_default=True, help="Column of --data.")
@click.option("--pair-columns", metavar="A,B", help="Columns of --data with the two texts of a pair.")
@click.option("--score-column", default="score", show_default=True, help="Column of a pair's likeness.")
@_limit("--min-cosine", "Of embeddings with the reference's.")
@_limit("--max-difference", "Of probabilities; of tensors, relative.")
@_limit("--min-invariance-cosine", "The same among answers to one text in different batches.")
@_limit("--max-invariance-difference", "The same, by difference.")
@_limit("--min-label-agreement", "Share of texts with the reference's label.")
@click.option(
    "--max-drop",
    type=console.Finite(),
    help=f"Of the task's metric, in percentage points.  [default: {LIMITS['fp32'].max_drop}]",
)
@click.option("--cores", callback=cpu_list, metavar="LIST", help="CPUs to use, e.g. 0,2-3.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Of each engine.")
@click.option("--json", "json_path", type=_FILE, help="Write all figures to this file.")
def check(
    model: Path,
    engine: str | None,
    form: str | None,
    precision: Literal["auto", "fp32", "bf16"] | None,
    *,
    texts: Path | None,
    text_column: str,
    cores: tuple[int, ...] | None,
    threads: int,
    json_path: Path | None,
    **flags: Any,
) -> int:
    """Compare every way to run a model with its reference, on this CPU.

    MODEL is a model directory; its reference is the form that was imported, on onnxruntime in fp32. Checked
    are, always by the worst case: agreement with the reference, that a text's answer depends on neither
    batch-mates nor padding, that the same batch gives the same bits, and every shape that a worker would
    load. With --data: accuracy and macro F1 of classifiers, or with --pair-columns Spearman's correlation of
    embeddings. A verdict is stored in MODEL: workers choose no form that failed. Exits with 1 if a limit is
    broken, or if a process of the check was killed: then that variant has no verdict.

    \b
    Examples:
      gristmill-worker model check models/minilm
      gristmill-worker model check models/topics --data test.csv --text-column body --label-column team
      gristmill-worker model check models/minilm --data sts.csv --pair-columns a,b --score-column likeness
    """
    with console.needs_extra("worker"):
        from gristmill_worker.engines.choice import AUTO, Wanted
        from gristmill_worker.models.check import report as check_report
        from gristmill_worker.models.check.run import CheckOptions
        from gristmill_worker.models.check.run import check as run
    if json_path is not None:
        console.check_writable(json_path)
    options = CheckOptions(
        model=model,
        wanted=Wanted(engine or AUTO, form or AUTO, precision or "auto"),
        texts=texts,
        text_column=text_column,
        data=_read_data(text_column, flags),
        limits={name: value for name, value in flags.items() if name.startswith(("min_", "max_"))},
        cores=cores,
        threads=threads,
    )
    with Console(stderr=True).status("starting") as status:
        report = run(options, say=status.update)
    check_report.print_report(Console(), report)
    if report.not_stored is not None:
        click.echo(f"the verdicts were not stored: {report.not_stored}", err=True)
    if json_path is not None:
        check_report.write_json(report, json_path)
    return ExitCode.OK if report.passed else ExitCode.FAILURE


def _read_data(text_column: str, flags: dict[str, Any]) -> Labelled | ScoredPairs | None:
    from gristmill_worker.models.labelled import read_labelled, read_pairs

    data, pair_columns = flags["data"], flags["pair_columns"]
    if data is None:
        if pair_columns is not None:
            raise click.UsageError("--pair-columns names columns of --data, which is missing")
        return None
    if pair_columns is None:
        return read_labelled(data, text_column, flags["label_column"])
    columns = [column.strip() for column in pair_columns.split(",")]
    if len(columns) != 2 or not all(columns):
        raise click.UsageError("--pair-columns takes two names with a comma between them")
    return read_pairs(data, (columns[0], columns[1]), flags["score_column"])
