"""The options that say what to score and what comes out, of every command that scores files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from gristmill import console
from gristmill.bulk.job import PART_ROWS
from gristmill.bulk.kinds import Kind, kind_of
from gristmill.core import MAX_WINDOW
from gristmill.errors import InputFileError

Command = Callable[..., Any]


def _delimiter(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    value = "\t" if value in ("\\t", "tab") else value
    if value is not None and (len(value) != 1 or value in '"\r\n'):
        raise click.BadParameter("use one character, or \\t for a tab")
    return value


def _kind(_: click.Context, __: click.Parameter, value: str | None) -> Kind | None:
    try:
        return None if value is None else kind_of(f".{value}")
    except InputFileError as error:
        raise click.BadParameter(str(error)) from error


def _names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if len({*names}) < len(names):
        raise click.BadParameter("a name is given twice")
    return names


sources = click.argument("source", metavar="IN...", nargs=-1, required=True)
output = click.option("--out", required=True, metavar="OUT", help="File to write, or '-'.")

_ROWS: Final = (
    click.option("--text-column", required=True, metavar="C", help="Column with the text."),
    click.option("--pair-column", metavar="C", help="Column with the second text of a pair."),
    click.option("--top-k", type=click.IntRange(min=0), default=1, show_default=True, help="Labels; 0: all."),
    click.option("--truncate/--no-truncate", default=True, show_default=True, help="Cut too long texts."),
    click.option(
        "--columns", metavar="C,…", callback=_names, help="Input columns to pass on.  [default: all]"
    ),
    click.option(
        "--results",
        metavar="R,…",
        callback=_names,
        help="Of label, score, scores, embedding, error, model, tokens, truncated.  [default: by the task]",
    ),
    click.option("--prefix", default="gm_", show_default=True, help="Of the result columns' names."),
    click.option(
        "--in-format", "in_kind", metavar="F", callback=_kind, help="Where names do not tell: csv.gz, …"
    ),
    click.option("--format", "out_kind", metavar="F", callback=_kind, help="The same of OUT."),
    click.option("--delimiter", callback=_delimiter, help="Of CSV files.  [default: ,]"),
    click.option(
        "--rejects", type=click.Path(path_type=Path), help="Failed rows.  [default: OUT.rejects.jsonl]"
    ),
    click.option("--max-errors", type=click.IntRange(min=0), metavar="N", help="Stop when more rows failed."),
    click.option("--parts", is_flag=True, help="OUT becomes a folder of part files."),
    click.option(
        "--part-rows",
        type=click.IntRange(min=1),
        default=PART_ROWS,
        show_default=True,
        help="Rows of a part.",
    ),
    console.priority_option,
    click.option(
        "--window",
        type=click.IntRange(1, MAX_WINDOW),
        help="Rows in flight.  [default: what keeps workers busy]",
    ),
    click.option("--force", is_flag=True, help="Start afresh; replace OUT if it exists."),
    click.option(
        "--wait",
        type=console.Finite(min=0),
        default=30,
        show_default=True,
        metavar="S",
        help="Seconds to wait for a worker of --queue, also during the run.",
    ),
)


def rows(command: Command) -> Command:
    """Add the options that are fields of :class:`~gristmill.bulk.job.Job`."""
    for option in reversed(_ROWS):
        command = option(command)
    return command
