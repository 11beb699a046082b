"""What both command lines share: typed errors become one line and a documented exit code."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from gristmill import start
from gristmill.errors import ExitCode, GristmillError, InputFileError
from gristmill.keys import DEFAULT, PRIORITIES

EXIT_CODES: Final = "Exit codes: " + ", ".join(
    f"{code.value} {code.name.lower().replace('_', ' ')}" for code in ExitCode
)
QUICK_RETRY_S: Final = 3.0  # who types a command does not want to wait long for a Redis that is not there

redis_option = click.option(
    "--redis",
    metavar="URL",
    envvar="GRISTMILL_REDIS",
    default="redis://localhost:6379/0",
    show_default=True,
    show_envvar=True,
    help="Where the queues are.",
)

priority_option = click.option(
    "--priority",
    type=click.Choice(PRIORITIES),
    default=DEFAULT,
    show_default=True,
    help="Of these requests among all of the queue.",
)


def run(group: click.Group) -> NoReturn:
    """Run a command line; a command returns its exit code, or None for success.

    An error's notes say what to know beside its message: where partial output is, the end of a log.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by who started us: the next file opened would take its place
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    try:
        start.on_interruption(signal.default_int_handler)  # raises: what is at work tidies up
        try:
            code = _outcome(group)
        finally:
            start.on_interruption(start.end)
    except KeyboardInterrupt:  # one more
        code = ExitCode.INTERRUPTED
    sys.exit(code)


def _outcome(group: click.Group) -> int:
    try:
        return int(group.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except GristmillError as error:
        _show_notes(error)
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        _show_notes(error.__context__ if isinstance(error, click.Abort) else error)
        return ExitCode.INTERRUPTED
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        return ExitCode.FAILURE


class Finite(click.FloatRange):
    """A number within bounds; neither infinite nor NaN, which compare with no bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def age(seconds: float | None) -> str:
    """Return a time in a unit that suits it, '' for None."""
    if seconds is None:
        return ""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def plain(text: str, most: int | None = 64) -> str:
    """Return ``text`` without what a terminal obeys rather than shows, cut to ``most`` characters."""
    cut = text if most is None or len(text) <= most else f"{text[: most - 1]}…"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cut)


def print_outcome(outcome: Mapping[str, str]) -> None:
    """Print what became of each request, one a line."""
    for request_id, what in outcome.items():
        click.echo(f"{request_id}\t{what}")


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn a package that is missing in the block into advice: install ``extra``."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputFileError(
            f"the package {error.name!r} is missing: pip install 'gristmill[{extra}]'"
        ) from error


def check_writable(path: Path) -> None:
    """Raise InputFileError if the file ``path`` cannot be written: better before long work than after."""
    existed = path.exists()
    try:
        try:
            path.open("ab").close()
        finally:
            if not existed:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise InputFileError(f"{path} cannot be written: {error.strerror}") from error


def _show_notes(error: BaseException | None) -> None:
    for note in getattr(error, "__notes__", ()):
        click.echo(note, err=True)
