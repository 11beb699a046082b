"""The folder beside an output that makes its run resumable: who is writing what, and how far it got."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import orjson

from gristmill.bulk.disk import disk_errors, sync_folder, write_atomically
from gristmill.bulk.rows import BEGINNING, Place
from gristmill.errors import InputFileError

VERSION: Final = 1
JOB: Final = "job.json"
STATE: Final = "checkpoint.json"
ROWS: Final = "rows"
REJECTS: Final = "rejects.jsonl"
WHOLE: Final = "whole"
OLD: Final = "old"

_OURS: Final = {JOB, STATE, ROWS, REJECTS, WHOLE, OLD, JOB + ".tmp", STATE + ".tmp"}


@dataclass(frozen=True, slots=True)
class State:
    """How far a run got; everything that it counts is on the disk.

    ``parts`` are sealed, ``filled`` is the number of rows in the open one and ``mark`` what counts of it
    (see :class:`~gristmill.bulk.parts.Parts`); ``rejects`` are bytes. ``place`` is where to go on
    reading. ``inode`` is the finished output's, from just before it gets its name; 0 until then.
    """

    parts: int = 0
    filled: int = 0
    mark: int = 0
    rejects: int = 0
    place: Place = BEGINNING
    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    ended: bool = False
    inode: int = 0

    @property
    def begun(self) -> bool:
        """Whether there is anything to go on with."""
        return self.rows > 0 or self.ended


class Store:
    """The folder of one run, locked against other runs; a context manager.

    ``job`` identifies the run: a run is only resumed where it is the same. ``state`` is the last checkpoint,
    ``found_rows`` the number of rows that were there, also where they are not gone on with.
    Raises InputFileError if another run holds the folder, if it is not a run's, or if the job is another.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], *, force: bool, resumable: bool) -> None:
        self.folder = folder
        self.rows = folder / ROWS
        self.rejects = folder / REJECTS
        self.whole = folder / WHOLE
        self.state = State()
        self.found_rows = 0
        self._afresh = False
        self._lock = _locked(folder)
        try:
            with disk_errors(folder):
                self._open({"version": VERSION, **job}, force=force, resumable=resumable)
        except BaseException:
            try:
                if self._afresh:
                    with suppress(InputFileError):  # the first error counts
                        self.remove()
            finally:
                os.close(self._lock)
            raise

    def _open(self, job: Mapping[str, Any], *, force: bool, resumable: bool) -> None:
        if other := {path.name for path in self.folder.iterdir()} - _OURS:
            listed = ", ".join(sorted(other)[:3])
            raise InputFileError(
                f"{self.folder} holds files that are not of a run ({listed}): move them away"
            )
        known = read_job(self.folder)
        state = State()
        if known is not None and not force:
            with nullcontext() if resumable else suppress(InputFileError):  # a damaged one is started afresh
                state = read_state(self.folder)
        self.found_rows = state.rows
        if known is not None and state.begun and resumable:
            if points := changes(known, job):
                raise InputFileError(
                    f"{self.folder} holds an unfinished run of another job: {'; '.join(points)}. "
                    "Give what was given then to go on with it, or --force to start afresh"
                )
            self.state = state
        else:
            self._afresh = True
            self.clear()
            write_atomically(self.folder / JOB, orjson.dumps(job, option=orjson.OPT_INDENT_2))
        self.rows.mkdir(exist_ok=True)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)

    def save(self, state: State) -> None:
        """Make ``state`` the checkpoint; what it counts has to be on the disk."""
        write_atomically(self.folder / STATE, orjson.dumps(asdict(state)))
        self.state = state

    def clear(self) -> None:
        """Remove all that an earlier run left; its identity first, so that it is never taken for whole."""
        for name in (JOB, STATE):
            (self.folder / name).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def remove(self) -> None:
        """Remove the folder: the run is finished."""
        with disk_errors(self.folder):
            self.clear()
            self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self.state.begun and self.folder.exists():
                self.remove()
        finally:
            os.close(self._lock)


def read_job(folder: Path) -> dict[str, Any] | None:
    """Return the identity of the run in ``folder``; None if there is none."""
    try:
        found = orjson.loads((folder / JOB).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError) as error:
        raise _damaged(folder / JOB) from error
    if not isinstance(found, dict):
        raise _damaged(folder / JOB)
    return found


def read_state(folder: Path) -> State:
    """Return the last checkpoint in ``folder``; that of a beginning if there is none."""
    try:
        found = orjson.loads((folder / STATE).read_bytes())
        return State(**{**found, "place": Place(**found["place"])})
    except FileNotFoundError:
        return State()
    except (OSError, TypeError, KeyError, orjson.JSONDecodeError) as error:
        raise _damaged(folder / STATE) from error


def _damaged(path: Path) -> InputFileError:
    return InputFileError(f"{path} cannot be read: the run cannot be resumed; use --force to start afresh")


def changes(known: Mapping[str, Any], job: Mapping[str, Any]) -> list[str]:
    """Say in which points two jobs differ."""
    found = []
    for name in dict.fromkeys((*known, *job)):
        was, now = known.get(name), job.get(name)
        if was == now or name == "replace":
            continue
        if name == "inputs":
            found += _input_changes(was, now)
        else:
            found.append(f"{name} was {_short(was)}, now it is {_short(now)}")
    return found


def _input_changes(was: Any, now: Any) -> list[str]:
    names = [[one["name"] for one in inputs or ()] for inputs in (was, now)]
    if names[0] != names[1]:
        return [f"its inputs were {_short(names[0])}, now they are {_short(names[1])}"]
    return [f"the input {a['name']} has changed since" for a, b in zip(was, now, strict=True) if a != b]


def _short(value: Any, most: int = 200) -> str:
    text = orjson.dumps(value, default=str).decode()
    return text if len(text) <= most else text[:most] + "…"


def _locked(folder: Path) -> int:
    """Make ``folder``, lock it and return its descriptor; never through a link."""
    while True:
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise InputFileError(f"{folder}: another run is writing this output") from None
        except FileNotFoundError:
            pass
        os.close(descriptor)  # another run has just finished and removed it
