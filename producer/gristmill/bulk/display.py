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

from gristmill.bulk.score import OnProgress, Summary

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
            rate = summary.per_second(summary.rows)
            progress.update(
                task, total=summary.size_bytes, completed=summary.position, rows=summary.rows, rate=rate
            )

    with progress:
        task = progress.add_task("", total=None, rows=0, rate=0.0)
        yield show


def print_summary(console: Console, summary: Summary, out: Path) -> None:
    """Print what a finished run did, as a few aligned lines."""
    errors = ", ".join(f"{count:,} {code}" for code, count in summary.errors.most_common())
    p50, p99 = summary.latencies.percentile(50), summary.latencies.percentile(99)
    lines = {
        "rows": f"{summary.rows:,} in {summary.seconds:,.1f} s",
        "errors": f"{summary.failed:,} ({errors})" if errors else "0",
        "rate": f"{summary.per_second(summary.rows):,.0f} rows/s, "
        f"{summary.per_second(summary.tokens):,.0f} tokens/s",
    }
    if p50 is not None and p99 is not None:
        lines["latency"] = f"p50 {p50:,.0f} ms, p99 {p99:,.0f} ms (queued to scored)"
    if summary.truncated:
        lines["truncated"] = f"{summary.truncated:,} texts were cut to the model's length"
    lines["output"] = str(out)
    for name, value in lines.items():
        console.out(f"{name:<10}{value}", highlight=False)


def preview_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of scored rows, one line each; long cells give way to short ones."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = {name: [_cell(row.get(name)) for row in rows] for name in names}
    table = Table()
    for name in names:
        width = max(len(name), *(len(cell) for cell in cells[name]))
        table.add_column(escape(name), no_wrap=True, min_width=width if width <= SHORT_CHARS else None)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        text = f"{value:.4f}"
    elif isinstance(value, str):
        text = value.encode("utf-8", "replace").decode()
    else:
        text = "" if value is None else orjson.dumps(value).decode()
    text = " ".join(text.split())
    return Text(text if len(text) <= PREVIEW_CHARS else text[: PREVIEW_CHARS - 1] + "…")
