"""Which process a worker is, so that another one on the same kernel can tell whether it is dead."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from typing import Final

_START_TIME: Final = 19  # in /proc/<pid>/stat, counted from the state, which follows the name in parentheses
_ENDED: Final = "ZX"  # a zombie runs nothing any more


@cache
def here() -> str:
    """Name the host, its boot and the process namespace, ending in a slash; '' where that cannot be told.

    Containers on one host share the boot, but numbers of processes mean something only within a namespace.
    """
    try:
        if Path("/proc/self").readlink().name != str(os.getpid()):  # /proc is that of another namespace
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}/"
    except OSError:  # not Linux
        return ""


def own() -> str:
    """Name this process; '' where that cannot be told."""
    if not here():
        return ""
    state = _state(os.getpid())
    return f"{here()}{os.getpid()}/{state[1]}" if state else ""


def is_dead(process: str) -> bool:
    """Say whether ``process``, a name that begins with :func:`here`, has ended. In doubt it has not."""
    number, _, started = process.removeprefix(here()).partition("/")
    if not (number.isdigit() and started.isdigit()):
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it belongs to another user
        pass
    state = _state(int(number))
    return state is not None and (state[0] in _ENDED or state[1] != started)


def _state(pid: int) -> tuple[str, str] | None:
    """Return the state and the start time of a process, None where they cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[_START_TIME]
