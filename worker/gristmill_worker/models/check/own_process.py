"""Calling a function in a fresh process, which may die of it, and does not outlive its parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from gristmill.errors import GristmillError

Argument = TypeVar("Argument")
Value = TypeVar("Value")


_PR_SET_PDEATHSIG: Final = 1
_OWN_DOING: Final = frozenset(
    {signal.SIGSEGV, signal.SIGILL, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS}
)  # other signals come from outside


class ProcessDiedError(GristmillError):
    """The process ended before it had an answer; the message says how."""

    def __init__(self, code: int) -> None:
        self.killed: Final = code < 0 and -code not in _OWN_DOING  # the kernel, short of memory, or a person
        super().__init__(f"its process ended ({_how(code)})")


def call(function: Callable[[Argument], Value], argument: Argument) -> Value:
    """Return ``function(argument)`` from a new process, which is gone afterwards whatever happens.

    Raises :class:`ProcessDiedError`, and what the function raised.
    """
    context = multiprocessing.get_context("spawn")  # a fork would start with the parent's threads and memory
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(os.getpid(), sender, function, argument), daemon=True)
    process.start()
    sender.close()
    try:
        value = receiver.recv()
    except EOFError:
        process.join()
        raise ProcessDiedError(process.exitcode or 0) from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(value, BaseException):
        raise value
    return value  # type: ignore[no-any-return]


def _run(parent: int, sender: Connection, function: Callable[[Any], Any], argument: Any) -> None:
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller too, which ends this process
    try:
        value = function(argument)
    except Exception as error:  # noqa: BLE001 - raised again by the caller
        value = error
    sender.send(value)


def _die_with(parent: int) -> None:
    """Let the kernel end this process when its parent is gone, however that ended (Linux only)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the bond was made
            os._exit(1)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
