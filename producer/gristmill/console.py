"""What both command lines share: typed errors become one line and a documented exit code."""

from __future__ import annotations

import os
import sys
from typing import Final, NoReturn

import click

from gristmill.errors import ExitCode, GristmillError

EXIT_CODES: Final = "Exit codes: " + ", ".join(
    f"{code.value} {code.name.lower().replace('_', ' ')}" for code in ExitCode
)


def run(group: click.Group) -> NoReturn:
    """Run a command line; a command returns its exit code, or None for success."""
    try:
        code = group.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except GristmillError as error:
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; a flush at exit would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.OK
    sys.exit(int(code or 0))
