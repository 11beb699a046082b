"""``gristmill-worker model quantize``."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from gristmill import console as gristmill_console
from gristmill_worker.models.limits import as_figure, by_cosine

if TYPE_CHECKING:
    from gristmill_worker.models.quantize.compare import Comparison
    from gristmill_worker.models.quantize.job import Options
    from gristmill_worker.models.quantize.run import Report

_SHARE = gristmill_console.Finite(min=0, max=1)
_MISSING = "worker,quantize"
_ONLY = {  # options of one kind of form
    "calibration": "int8-ort",
    "max_float": "int8-ort",
    "attention": "int8-openvino",
    "sparsity": "int8-deepsparse",
}
_WORDS = {  # by whether answers are compared by cosine: the measure, its option, the most among neighbours
    True: ("min cosine", "--min-cosine", 0.0005),
    False: ("largest difference of a probability", "--max-difference", 0.02),
}


@click.command("quantize")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--form", "kind", required=True, help="Kind of form to make, see above.")
@click.option("--name", help="Name of the form in the directory.  [default: like its kind]")
@click.option(
    "--texts",
    type=click.Path(dir_okay=False, path_type=Path),
    help="CSV or JSONL file of texts like those to be scored.  [default: Python's documentation]",
)
@click.option("--text-column", default="text", show_default=True, help="Column of the texts.")
@click.option(
    "--calibration-texts",
    default=256,
    show_default=True,
    type=click.IntRange(min=8),
    help="Texts that static ranges are taken from.",
)
@click.option(
    "--calibration",
    default="min-max",
    show_default=True,
    type=click.Choice(["min-max", "percentile", "entropy"]),
    help="How int8-ort takes ranges from values.",
)
@click.option(
    "--min-cosine",
    default=0.99,
    show_default=True,
    type=_SHARE,
    help="How near to fp32 the worst embedding should be; int8-ort keeps layers in float for it.",
)
@click.option(
    "--max-difference",
    default=0.1,
    show_default=True,
    type=_SHARE,
    help="The same for the probabilities of a classifier.",
)
@click.option(
    "--max-float",
    default=0.25,
    show_default=True,
    type=_SHARE,
    help="Share of layers that int8-ort keeps so.",
)
@click.option(
    "--reduce-range/--no-reduce-range",
    default=None,
    help="Weights of 7 bits, for CPUs without VNNI.  [default: by this CPU]",
)
@click.option("--attention", is_flag=True, help="int8-openvino: the attention too, which may answer wrongly.")
@click.option(
    "--sparsity",
    default=0.0,
    show_default=True,
    type=_SHARE,
    help="int8-deepsparse: share of weights to prune, to see the speed; answers suffer.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads to use.  [default: all usable CPUs]")
@click.option("--force", is_flag=True, help="Replace the form if there is one of that name.")
def quantize_command(
    calibration: Any,
    min_cosine: float,
    max_difference: float,
    max_float: float,
    reduce_range: bool | None,
    attention: bool,
    sparsity: float,
    **what: Any,
) -> None:
    """Add an int8 form to the model directory MODEL.

    \b
    int8-rows         one range a token, found while running: the nearest to fp32, in openvino and onnxruntime
    int8-openvino     static ranges by NNCF: often the fastest, in openvino
    int8-deepsparse   static ranges, smoothed: in deepsparse, and in onnxruntime
    int8-ort          static ranges, the worst layers in float, in onnxruntime
    int8-ort-dynamic  one range a batch, in onnxruntime: a text's answer depends on its neighbours

    The form is made from the imported fp32 model, tried beside it on texts that it was not made with, and
    then added in one step. Other forms are left as they are. Static ranges want texts like those that will be
    scored.

    \b
    Examples:
      gristmill-worker model quantize models/minilm --form int8-rows
      gristmill-worker model quantize models/tickets --form int8-openvino --texts tickets.csv
    """
    given = click.get_current_context().get_parameter_source
    for option, only in _ONLY.items():
        if given(option) is ParameterSource.COMMANDLINE and what["kind"] != only:
            raise click.UsageError(f"--{option.replace('_', '-')} is for --form {only}")
    with gristmill_console.needs_extra(_MISSING):
        from gristmill_worker.models.quantize.job import Options, default_reduce_range
        from gristmill_worker.models.quantize.run import Request, quantize

        options = Options(
            calibration=calibration,
            min_cosine=min_cosine,
            max_difference=max_difference,
            max_float_share=max_float,
            reduce_range=default_reduce_range() if reduce_range is None else reduce_range,
            attention=attention,
            sparsity=sparsity,
        )
        with Console(stderr=True).status("starting") as status:
            report = quantize(Request(options=options, **what), status.update)
    _print(Console(), report, what["model"], options)


def _print(console: Console, report: Report, model: Path, options: Options) -> None:
    task = report.manifest.task
    kind, worst = ("cosine to", "min") if by_cosine(task) else ("differences of probabilities from", "max")
    sizes = f"{report.form_bytes / 1e6:.1f} MB, fp32 {report.reference_bytes / 1e6:.1f} MB"
    _line(console, f"{report.name} is in {model}: {sizes}")
    _line(console, report.form.method)
    first = report.comparisons[0]
    table = Table(title=f"{kind} fp32 of {first.texts} held-out texts, and speed", title_justify="left")
    table.add_column("runs as")
    labels = ("same label",) if first.same_label is not None else ()
    shapes = (f"{batch}x{sequence}" for batch, sequence in first.speedups)
    for heading in (worst, "mean", "neighbours", *labels, *shapes):
        table.add_column(heading, justify="right")
    for found in report.comparisons:
        row = [f"{found.variant.engine} {found.variant.precision}"]
        values = (found.worst, found.mean, found.neighbours)
        row += [f"{as_figure(task, value):.4f}" for value in values]
        row += [f"{found.same_label:.1%}"] if found.same_label is not None else []
        table.add_row(*row, *(f"{ratio:.2f}x" for ratio in found.speedups.values()))
    console.print(table, highlight=False)
    for note in (*report.notes, *(_advice(found, options) for found in report.comparisons)):
        _line(console, f"- {note}")
    check = f"gristmill-worker model check {model}"
    _line(console, f"- It has no verdict yet: run '{check}', as 'auto' does not use an unchecked form.")


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _advice(found: Comparison, options: Options) -> str:
    manifest = found.variant.manifest
    task = manifest.task
    measure, option, most_among_neighbours = _WORDS[by_cosine(task)]
    speed = geometric_mean(found.speedups.values())
    said = (
        f"{found.variant.engine} {found.variant.precision}: {speed:.1f}x the speed of onnxruntime fp32 here"
    )
    if speed < 1.1:
        said += ", which is no gain: serve fp32 on this CPU"
    said += f"; {measure} {as_figure(task, found.worst):.4f}"
    if found.worst > options.goal(manifest):
        said += f", beyond the {as_figure(task, options.goal(manifest)):g} that {option} asks for"
    if found.neighbours > most_among_neighbours:
        said += "; the same text with other neighbours differs "
        said += f"({measure} {as_figure(task, found.neighbours):.4f})"
    return said + "."
