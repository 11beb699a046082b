"""Where both command lines start: from here on an interruption ends them without a traceback.

Imports next to nothing itself, not even typing, as before :func:`run` is called there is no handler yet.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

    Handler = Callable[[int, FrameType | None], Any]

INTERRUPTED = 130  # ExitCode.INTERRUPTED


def run(module: str) -> NoReturn:
    """Import ``module``, which may take a second, and end with what its ``main`` returns."""
    on_interruption(end)
    raise SystemExit(import_module(module).main())


def on_interruption(handler: Handler) -> None:
    """Have Ctrl-C, SIGTERM and SIGHUP call ``handler``.

    What was ignored stays so: SIGHUP under nohup, Ctrl-C in the background jobs of a script.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def end(_number: int, _frame: FrameType | None) -> NoReturn:
    """End the process: the handler for where there is nothing to tidy up.

    It raises nothing, since what is raised in the midst of an import may be printed, ignored and so be lost.
    """
    os._exit(INTERRUPTED)
