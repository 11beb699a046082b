"""What ``tune`` found: tables and a heat map in the terminal, YAML to paste, JSON, a PNG."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gristmill.errors import InputFileError
from gristmill_worker.engines.base import Shape
from gristmill_worker.tune.advice import Recommendation
from gristmill_worker.tune.run import Report

_ON_HEAT: Final = Style(color="black")


def print_report(console: Console, report: Report) -> None:
    """Print everything, the recommendations last."""
    console.print(_summary(report))
    if report.compared:
        _print(console, "Ways to run it, texts/s of one engine (* measured further)", _compared(report))
    for name, reason in report.refused.items():
        console.print(f"{name} was left out: {reason}", highlight=False, markup=False)
    _print(console, "µs per token, padding included (~ fitted, * chosen)", _heat_map(report))
    _print(console, "Shapes: cost of the texts without padding / planned, windows of 256", _sets(report))
    _print(console, "Windows: texts/s of one worker under backlog, by texts in a window", _windows(report))
    if report.threads:
        _print(console, "Threads: the same cores in two ways", _threads(report))
    for recommendation in report.recommendations:
        _print_recommendation(console, recommendation)


def _print(console: Console, title: str, table: Table) -> None:
    console.print(f"\n[bold]{title}[/bold]", table, highlight=False)


def yaml_snippet(report: Report, recommendation: Recommendation) -> str:
    """Return what to paste into a worker's configuration."""
    shapes = ", ".join(f"[{batch}, {sequence}]" for batch, sequence in recommendation.shapes)
    lines = [
        f"engine: {report.key.engine}",
        f"form: {report.variant.form}",
        f"precision: {report.variant.floats}",
        f"threads: {recommendation.threads}",
        *(
            [f"engine_memory_mb: {report.compilations.memory_mb(len(recommendation.shapes))}"]
            if report.compilations is not None
            else []
        ),
        "batch:",
        f"  max_items: {recommendation.max_items}",
    ]
    if recommendation.max_wait_ms is not None:
        lines.append(f"  max_wait_ms: {recommendation.max_wait_ms:g}")
    return "\n".join([*lines, f"  shapes: [{shapes}]", ""])


def write_json(report: Report, path: Path) -> None:
    """Write all figures, in the units that their names tell."""
    quartiles = dict(zip(("p5", "p50", "p95", "max"), _percentiles(report), strict=True))
    data = {
        "key": report.key.model_dump(),
        "cores": report.cores,
        "texts": {
            "source": report.texts,
            "count": len(report.lengths),
            "skipped_rows": report.skipped,
            "tokens": quartiles,
        },
        "costs": [
            {"shape": shape, "seconds": seconds, "fitted": shape in report.costs.fitted}
            for shape, seconds in sorted(report.costs.seconds.items())
        ],
        "fit_error": report.fit_error,
        "passes": report.passes,
        "measuring_s": report.measuring_s,
        "switching": {"alone": report.switching_alone, "batches": report.switching},
        "efficiency": {
            "default_shapes": report.default_shapes,
            "default": report.default_efficiency,
            "by_count": {str(count): share for count, share in report.by_count.items()},
        },
        "texts_per_s_by_window": {str(window): rate for window, rate in report.by_window.items()},
        "compared": [
            {
                "engine": row.variant.engine,
                "form": row.variant.form,
                "precision": row.variant.precision,
                "texts_per_s": [[shape, rate] for shape, rate in row.texts_per_s.items()],
                "doubt": row.doubt,
            }
            for row in report.compared
        ],
        "compilations": report.compilations
        and {
            "gains": [[shape, gain] for shape, gain in report.compilations.gains.items()],
            "mb_per_shape": report.compilations.mb_per_shape,
        },
        "threads": report.threads,
        "recommendations": report.recommendations,
        "table": str(report.table),
    }
    path.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")


def check_png() -> None:
    """Raise InputFileError if no PNG can be drawn."""
    if find_spec("matplotlib") is None:
        raise InputFileError(
            "the package 'matplotlib' is missing, which draws the PNG: pip install 'gristmill[tune]'"
        )


def write_png(report: Report, path: Path) -> None:
    """Draw microseconds per token of every shape; chosen shapes are framed, fitted values in brackets."""
    check_png()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    batches, sequences = _axes(report)
    per_token = _us_per_token(report)
    grid = np.array([[per_token.get((b, s), math.nan) for b in batches] for s in sequences])
    figure = Figure(figsize=(1.6 + len(batches), 1.4 + 0.4 * len(sequences)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(np.log(grid), aspect="auto", cmap="RdYlGn_r")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yticks(range(len(sequences)), [str(sequence) for sequence in sequences])
    axes.set_xlabel("batch")
    axes.set_ylabel("sequence length (tokens)")
    axes.set_title(
        f"µs per token: {report.key.engine} {report.key.precision}, {report.key.threads} thread(s)"
    )
    for (batch, sequence), value in per_token.items():
        x, y = batches.index(batch), sequences.index(sequence)
        label = f"({value:.0f})" if (batch, sequence) in report.costs.fitted else f"{value:.0f}"
        axes.text(x, y, label, ha="center", va="center", fontsize=8)
        if (batch, sequence) in report.recommendations[0].shapes:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, linewidth=2))
    bar = figure.colorbar(image)
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    bar.set_ticks([math.log(low), math.log(high)], labels=[f"{low:.0f}", f"{high:.0f}"])
    figure.savefig(path, dpi=120, format="png")


def _compared(report: Report) -> Table:
    shapes = report.compared[0].seconds
    table = Table("", *(f"{batch}x{sequence}" for batch, sequence in shapes), "auto takes it")
    for row in report.compared:
        mark = " *" if str(row.variant) == str(report.variant) else ""
        rates = (f"{rate:,.1f}" for rate in row.texts_per_s.values())
        table.add_row(f"{row.variant}{mark}", *rates, "yes" if row.doubt is None else f"no: {row.doubt}")
    return table


def _summary(report: Report) -> Table:
    table = Table(show_header=False, box=None)
    key = report.key
    p5, p50, p95, longest = _percentiles(report)
    measured = len(report.costs.seconds) - len(report.costs.fitted)
    table.add_row("cpu", key.cpu)
    table.add_row("cores", f"{', '.join(map(str, report.cores))}; measured with {key.threads} thread(s)")
    table.add_row("engine", f"{key.engine} {key.engine_version}, {key.precision}")
    table.add_row(
        "texts", f"{report.texts}: {p5:.0f} / {p50:.0f} / {p95:.0f} / {longest:.0f} tokens (p5/p50/p95/max)"
    )
    if report.skipped:
        table.add_row("left out", f"{report.skipped} rows without a text")
    table.add_row("measured", f"{measured} shapes in {report.passes} passes, {report.measuring_s:.0f} s")
    table.add_row("fitted", f"{len(report.costs.fitted)} shapes, usual error of a fit {report.fit_error:.1%}")
    changes = {"batches of 1": report.switching_alone, "larger batches": report.switching}
    said = [f"{name} {share:+.1%}" for name, share in changes.items() if share is not None]
    table.add_row("change of shape", f"{', '.join(said)} against the same shape again")
    if report.compilations is not None:
        found = report.compilations
        table.add_row(
            "compilations",
            f"one for all shapes takes {found.gain:+.1%} time; each of its own {found.mb_per_shape:.0f} MiB",
        )
    table.add_row("costs", str(report.table))
    return table


def _heat_map(report: Report) -> Table:
    """Sequence lengths down, batch sizes across: µs per token from green to red."""
    batches, sequences = _axes(report)
    per_token = _us_per_token(report)
    low, high = math.log(min(per_token.values())), math.log(max(per_token.values()))
    table = Table(box=None)
    table.add_column("tokens", justify="right")
    for batch in batches:
        table.add_column(f"batch {batch}" if batch == 1 else str(batch), justify="right")
    for sequence in sequences:
        cells = []
        for shape in ((batch, sequence) for batch in batches):
            if (value := per_token.get(shape)) is None:
                cells.append(Text())
                continue
            fitted = "~" if shape in report.costs.fitted else ""
            chosen = "*" if shape in report.recommendations[0].shapes else " "
            heat = (math.log(value) - low) / ((high - low) or 1.0)
            cells.append(Text(f"{fitted}{value:.0f}{chosen}", _ON_HEAT + Style(bgcolor=_colour(heat))))
        table.add_row(str(sequence), *cells)
    return table


def _sets(report: Report) -> Table:
    table = Table()
    table.add_column("shapes", justify="right")
    table.add_column("efficiency", justify="right")
    table.add_row(f"{report.default_shapes} (default)", f"{report.default_efficiency:.1%}")
    for count, share in report.by_count.items():
        table.add_row(str(count), f"{share:.1%}")
    return table


def _windows(report: Report) -> Table:
    table = Table()
    for window in report.by_window:
        table.add_column(str(window), justify="right")
    table.add_row(*(f"{rate:.0f}" for rate in report.by_window.values()))
    return table


def _threads(report: Report) -> Table:
    compared = round(
        report.threads[0].single_s * report.threads[0].singles_per_s / report.threads[0].shape[0]
    )
    table = Table()
    table.add_column("shape")
    table.add_column(f"{compared} engines of 1 thread", justify="right")
    table.add_column(f"1 engine of {compared} threads", justify="right")
    for row in report.threads:
        table.add_row(
            f"{row.shape[0]}x{row.shape[1]}",
            f"{row.singles_per_s:.0f} texts/s, {row.single_s * 1000:.1f} ms",
            f"{row.wide_per_s:.0f} texts/s, {row.wide_s * 1000:.1f} ms",
        )
    return table


def _print_recommendation(console: Console, recommendation: Recommendation) -> None:
    workers = f"{recommendation.workers} worker{'s' if recommendation.workers > 1 else ''}"
    console.print(
        f"\n[bold]For {recommendation.goal}[/bold]: {workers} of {recommendation.threads} thread(s), "
        f"{len(recommendation.shapes)} shapes, windows of {recommendation.max_items}: "
        f"{recommendation.texts_per_s:.0f} texts/s by the engine alone, 95 % of windows within "
        f"{recommendation.window_p95_ms:.0f} ms, efficiency {recommendation.efficiency:.1%}",
        highlight=False,
    )
    if recommendation.note:
        console.print(recommendation.note, style="yellow", highlight=False)


def _percentiles(report: Report) -> list[float]:
    found: list[float] = np.percentile(report.lengths, (5, 50, 95, 100)).tolist()
    return found


def _axes(report: Report) -> tuple[list[int], list[int]]:
    shapes = report.costs.seconds
    return sorted({batch for batch, _ in shapes}), sorted({sequence for _, sequence in shapes})


def _us_per_token(report: Report) -> dict[Shape, float]:
    return {shape: seconds * 1e6 / (shape[0] * shape[1]) for shape, seconds in report.costs.seconds.items()}


def _colour(heat: float) -> Any:
    """Return the colour of ``heat``, green at 0, yellow at 0.5, red at 1."""
    red, green = min(1.0, 2 * heat), min(1.0, 2 - 2 * heat)
    return f"#{int(90 + 140 * red):02x}{int(90 + 120 * green):02x}5a"
