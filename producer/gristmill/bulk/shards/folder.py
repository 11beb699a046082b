"""The folder that all jobs of a run share.

Everything that the jobs of a run share is in one folder, which all their machines have to reach::

    OUT.shards/
      plan-….json       what to score, where each part begins, which shard scores which parts
      parts-…/000007/   a part that is done: its rows, its rejects and state.json
      tries/…/          what one job is writing
      lock              held by a submission and by the merging job
      merge/, merging   the output in the making

A part is done when its folder has its name: it is written elsewhere, brought to the disk and renamed in one
step, which fails where the name is taken. So a job may be killed at any time, and may run twice at the same
time on different machines (RQ may take one for abandoned that still runs): the first to finish a part wins,
the other throws its own away, and no lock is needed that a file system might not keep across machines.
A run that is started afresh has another folder of parts, so that jobs of before have no part in it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from gristmill.bulk.disk import disk_errors, sync_folder
from gristmill.errors import InputFileError

TRIES: Final = "tries"
LOCK: Final = "lock"
MERGE: Final = "merge"
MERGING: Final = "merging"
STATE: Final = "state.json"

_PLAN: Final = "plan-{}.json"
_PARTS: Final = "parts-{}"


def plan_path(folder: Path, run: str) -> Path:
    """Return where a submission has its plan.

    Each has a name of its own: of one that was replaced, other machines might still see what it was.
    """
    return folder / _PLAN.format(run)


def parts_path(folder: Path, generation: str) -> Path:
    """Return where the parts are; ``generation`` is the submission that began afresh."""
    return folder / _PARTS.format(generation)


def plans(folder: Path) -> list[Path]:
    """Return the plans in ``folder``, the oldest first; there are several only after a crash."""
    return sorted(folder.glob(_PLAN.format("*")), key=lambda path: path.stat().st_mtime_ns)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run, which file servers keep across machines; raises InputFileError if it is held.

    Makes the folder; a folder without a plan is removed again.
    """
    file = _lock(folder)
    try:
        yield
    finally:
        with file:
            planned = bool(plans(folder))
            if not planned:
                (folder / LOCK).unlink(missing_ok=True)
        if not planned:
            with suppress(OSError):  # others have made it anew just now
                folder.rmdir()


def _lock(folder: Path) -> BinaryIO:
    while True:
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            file = (folder / LOCK).open("ab")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / LOCK).stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except FileNotFoundError:
            pass
        except (BlockingIOError, PermissionError):
            file.close()
            raise InputFileError(f"{folder}: another process submits or merges this run") from None
        except OSError as error:
            file.close()
            raise InputFileError(f"{folder} cannot be locked: {error.strerror or error}") from error
        file.close()  # who held it has just removed it


def clear(folder: Path) -> None:
    """Remove what a run left in its locked folder, what tells how far it is last.

    Raises InputFileError if there is anything else in it.
    """
    parts = {path.name for path in folder.glob(_PARTS.format("*"))}
    ours = {*parts, TRIES, LOCK, MERGE, MERGING, MERGING + ".tmp"}
    planned = {path.name for path in folder.glob(_PLAN.format("*") + "*")}
    with disk_errors(folder):
        names = {path.name for path in folder.iterdir()}
        if other := sorted(name for name in names - ours - planned if not name.startswith(".nfs")):
            listed = ", ".join(other[:3])
            raise InputFileError(f"{folder} holds files that are not of a run ({listed}): move them away")
        for name in sorted((names & ours) - {LOCK, MERGING}) + sorted(planned) + [MERGING]:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        sync_folder(folder)
