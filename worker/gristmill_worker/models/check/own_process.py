"""Calling a function in a fresh process, which may die of it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from gristmill.errors import GristmillError

Argument = TypeVar("Argument")
Value = TypeVar("Value")


class ProcessDiedError(GristmillError):
    """The process ended before it had an answer; the message says how."""


def call(function: Callable[[Argument], Value], argument: Argument) -> Value:
    """Return ``function(argument)`` from a new process, which is gone afterwards whatever happens.

    Raises :class:`ProcessDiedError`, and what the function raised.
    """
    context = multiprocessing.get_context("spawn")  # a fork would start with the parent's threads and memory
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, argument), daemon=True)
    process.start()
    sender.close()
    try:
        value = receiver.recv()
    except EOFError:
        process.join()
        raise ProcessDiedError(f"its process ended ({_how(process.exitcode or 0)})") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(value, BaseException):
        raise value
    return value  # type: ignore[no-any-return]


def _run(sender: Connection, function: Callable[[Any], Any], argument: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller too, which ends this process
    try:
        value = function(argument)
    except Exception as error:  # noqa: BLE001 - raised again by the caller
        value = error
    sender.send(value)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
