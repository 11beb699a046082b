"""How a run looks in a terminal: the progress bar, the summary, the preview table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from gristmill.bulk.summary import OnProgress, Summary

REFRESH_S: Final = 0.1
PREVIEW_CHARS: Final = 60  # of one cell
SHORT_CHARS: Final = 24  # a cell up to here is always shown whole


@contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress]:
    """Show a bar while the block runs: rows, rows/s, the share of the input's bytes, the time left.

    Shows nothing where the console is quiet or no terminal.
    """
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TextColumn("{task.fields[rate]:,.0f} rows/s"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    shown_at = 0.0

    def show(summary: Summary) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at >= REFRESH_S:
            shown_at = now
            rate = summary.rows_per_second()
            progress.update(
                task, total=summary.size_bytes, completed=summary.position, rows=summary.rows, rate=rate
            )

    with progress:
        task = progress.add_task("", total=None, rows=0, rate=0.0)
        yield show


def print_summary(
    console: Console,
    summary: Summary,
    out: str,
    *,
    rejects: Path | None = None,
    cost_per_hour: float | None = None,
) -> None:
    """Print what a finished run did, as a few aligned lines; ``cost_per_hour`` is of all machines."""
    errors = ", ".join(f"{count:,} {code}" for code, count in summary.errors.most_common())
    p50, p99 = summary.latencies.percentile(50), summary.latencies.percentile(99)
    lines = {
        "rows": f"{summary.rows:,} in {summary.total_s:,.1f} s",
        "errors": f"{summary.failed:,} ({errors})" if errors else "0",
        "rate": f"{summary.rows_per_second():,.0f} rows/s, {summary.tokens_per_second():,.0f} tokens/s",
    }
    if summary.resumed:
        lines["rows"] += f", {summary.resumed:,} of them before this run"
    if p50 is not None and p99 is not None:
        lines["latency"] = f"p50 {p50:,.0f} ms, p99 {p99:,.0f} ms (queued to scored)"
    if cost_per_hour is not None and summary.rows:
        cost = cost_per_hour * summary.total_s / 3600
        lines["cost"] = f"{cost:,.4g}, {cost / summary.rows * 1e6:,.4g} per million rows"
        if summary.tokens:
            lines["cost"] += f", {cost / summary.tokens * 1e6:,.4g} per million tokens"
    if summary.truncated:
        lines["truncated"] = f"{summary.truncated:,} texts were cut to the model's length"
    if rejects is not None and summary.failed:
        lines["rejects"] = str(rejects)
    lines["output"] = out
    for name, value in lines.items():
        console.out(f"{name:<10}{value}", highlight=False)


def preview_table(rows: list[dict[str, Any]], width: int) -> Table:
    """Return a table of scored rows, one line each, in ``width`` characters; long cells give way."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = {name: [_cell(row.get(name)) for row in rows] for name in names}
    widths = {name: max(len(name), *map(len, column)) for name, column in cells.items()}
    long = [name for name in names if widths[name] > SHORT_CHARS]
    left = width - 1 - 3 * len(names) - sum(widths[name] for name in names if name not in long)
    most = min(PREVIEW_CHARS, max(left // max(len(long), 1), SHORT_CHARS // 2))
    table = Table()
    for name in names:
        table.add_column(escape(name), no_wrap=True)
    for row in zip(*cells.values(), strict=True):
        table.add_row(
            *(
                _shortened(cell, most if name in long else widths[name])
                for name, cell in zip(names, row, strict=True)
            )
        )
    return table


def _shortened(text: str, most: int) -> Text:
    return Text(text if len(text) <= most else text[: most - 1] + "…")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        text = f"{value:.4f}"
    elif isinstance(value, str):
        text = value.encode("utf-8", "replace").decode()
    else:
        text = "" if value is None else orjson.dumps(value).decode()
    return " ".join(text.split())
