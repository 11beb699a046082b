"""A check's report: the table for a terminal, and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from gristmill_worker.models.check.judge import Judged
from gristmill_worker.models.check.run import Report


def print_report(console: Console, report: Report) -> None:
    """Print a column per variant, then the broken limits and what could not run."""
    console.print(
        f"{report.manifest.name}: {report.texts} items of up to {report.longest} tokens, "
        f"{report.seconds:.0f} s",
        highlight=False,
    )
    table = Table()
    table.add_column("")
    for entry in report.judged:
        table.add_column(str(entry.variant).replace(" ", "\n"), justify="right")
    columns = [_cells(entry, report.reference_metric) for entry in report.judged]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "-") for column in columns))
    console.print(table, highlight=False)
    for entry in report.judged:
        for problem in entry.verdict.problems:
            console.print(f"{entry.variant}: {problem}", highlight=False, markup=False, soft_wrap=True)
    for variant, how in report.killed.items():
        text = f"not judged: {variant}: {how}: was the memory short?"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    for variant, obstacle in report.obstacles.items():
        console.print(f"not checked: {variant}: {obstacle}", highlight=False, markup=False, soft_wrap=True)


def write_json(report: Report, path: Path) -> None:
    """Write every figure, limit and problem; shapes as ``batch x sequence`` by their worst difference."""
    data = {
        "model": report.manifest.id,
        "passed": report.passed,
        "items": report.texts,
        "longest": report.longest,
        "seconds": report.seconds,
        "reference_metric": report.reference_metric,
        "variants": [
            {
                "variant": str(entry.variant),
                **entry.verdict.model_dump(mode="json", exclude={"format", "shapes", "shared_shapes"}),
                "differences_by_shape": {
                    f"{batch}x{sequence}": difference  # null: failed, NaN or infinity
                    for (batch, sequence), difference in sorted(entry.findings.by_shape.items())
                },
            }
            for entry in report.judged
        ],
        "not_judged": report.killed,
        "not_checked": report.obstacles,
    }
    path.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")


def _cells(entry: Judged, reference_metric: Mapping[str, float]) -> dict[str, str]:
    """Return the texts of one column by the names of their rows."""
    figures, findings = entry.verdict.figures, entry.findings
    cells = {"verdict": "passed" if entry.verdict.passed else "FAILED"}
    if findings.failure:
        return cells
    for name in ("agreement_worst", "agreement_mean", "batch_worst", "padding_worst", "shapes_worst"):
        for unit, digits in (("cosine", ".6f"), ("difference", ".2g")):
            if (value := figures.get(f"{name}_{unit}")) is not None:
                cells[f"{name.replace('_', ', ')} {unit}"] = format(value, digits)
    cells["shapes tried"] = str(len(findings.by_shape))
    cells["same bits again"] = "yes" if findings.deterministic else "no"
    if findings.label_agreement is not None:
        cells["same label"] = f"{findings.label_agreement:.1%}"
    for name, value in findings.metric.items():
        title = f"{name.replace('_', ' ')} (reference {reference_metric[name]:.4f})"
        cells[title] = f"{value:.4f}"
    for (batch, sequence), ratio in findings.speed.items():
        cells[f"speed at {batch}x{sequence}"] = f"{ratio:.2f}"
    cells["loading"] = f"{findings.load_s:.1f} s"
    cells["memory"] = f"{findings.memory_mb:.0f} MB"
    return cells
