"""Runs a command that may not outlive its parent: ``python -m gristmill.guardian [--remove DIR] -- CMD…``.

The guardian sits between a parent (``gristmill score``, a test, …) and a child (a private Redis, a worker).
The parent holds the write end of the guardian's stdin. However the parent ends, also by SIGKILL, the kernel
closes that pipe; the guardian then ends the child (SIGTERM, a grace time, SIGKILL) and removes DIR. It also
ends the child on SIGTERM, and itself with the child's exit code when the child ends.

:func:`spawn` starts this file by its path, without ``site`` and without the package, so that it is up in
milliseconds; therefore only the standard library is imported here.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Final

GRACE_S: Final = 10.0  # between SIGTERM and SIGKILL
NOT_STARTED: Final = 127  # the exit code where CMD cannot be started, as in a shell

_PR_SET_PDEATHSIG: Final = 1
_END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def spawn(
    cmd: Sequence[str | Path],
    *,
    remove: Path | None = None,
    grace_s: float = GRACE_S,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``cmd`` under a guardian and return the guardian's process; end it with :func:`stop`.

    ``remove`` is a folder to delete once the command has ended, ``grace_s`` the seconds that the command has
    between SIGTERM and SIGKILL. The command is in a session of its own: Ctrl-C reaches the caller only.
    """
    options = ["--grace", str(grace_s)]
    if remove is not None:
        options += ["--remove", str(remove)]
    return subprocess.Popen(
        # -I and -S: neither the environment nor installed packages slow it down or disturb it.
        [sys.executable, "-I", "-S", __file__, *options, "--", *map(str, cmd)],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def stop(process: subprocess.Popen[bytes], timeout_s: float = GRACE_S + 5) -> int:
    """End what :func:`spawn` started, wait for it and return its exit code. May be called again.

    After ``timeout_s`` seconds the guardian is killed, which kills its command too (on Linux).
    """
    if process.stdin is not None:
        process.stdin.close()
    process.terminate()
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command to its end, or to the parent's; return the exit code (128 + n after signal n)."""
    parser = argparse.ArgumentParser(prog="gristmill.guardian", description=__doc__)
    parser.add_argument("--remove", type=Path, metavar="DIR", help="remove DIR after CMD has ended")
    parser.add_argument("--grace", type=float, default=GRACE_S, metavar="SECONDS", help="SIGTERM to SIGKILL")
    parser.add_argument("cmd", nargs="+", metavar="CMD")
    options = parser.parse_args(arguments)
    wakeup = _watch_signals()
    try:
        child = subprocess.Popen(
            options.cmd,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=_death_bond(),  # noqa: PLW1509 - this process has one thread
        )
    except OSError as error:
        print(f"error: cannot start {options.cmd[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
        code = NOT_STARTED
    else:
        code = _attend(child, wakeup, options.grace)
    if options.remove is not None:
        shutil.rmtree(options.remove, ignore_errors=True)
    return code


def _watch_signals() -> int:
    """Return a file descriptor that receives the number of each signal, as one byte."""

    def ignore(number: int, frame: FrameType | None) -> None:
        """Needed: only a signal with a Python handler is written to the wakeup descriptor."""

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGCHLD, *_END_SIGNALS):
        signal.signal(number, ignore)
    return reader


def _death_bond() -> Callable[[], None] | None:
    """Return what the child runs before CMD so that it dies with a killed guardian (Linux only)."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here: little is safe between fork and exec
    guardian = os.getpid()

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:  # it died before the bond was made
            os._exit(1)

    return bind


def _attend(child: subprocess.Popen[bytes], wakeup: int, grace_s: float) -> int:
    """Wait until the child has ended by itself or has to be ended; return its exit code."""
    while child.poll() is None:
        ready, _, _ = select.select([0, wakeup], [], [])
        parent_gone = 0 in ready and not os.read(0, 4096)
        told_to_end = wakeup in ready and any(number in _END_SIGNALS for number in os.read(wakeup, 4096))
        if parent_gone or told_to_end:
            _end(child, grace_s)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with what it has started itself
        child.wait()


if __name__ == "__main__":
    # Not by way of sys.exit: while Python winds up a signal would end this process with a code of its own.
    os._exit(main())
