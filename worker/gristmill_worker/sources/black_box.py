"""Which requests a process has in native code now, where others on its host can read it after its death.

A crash is the fault of what was in the engine or the tokenizer then. Without such a note each request that a
dead worker held has to run alone, as it may be the one. With it only some do; the others go on in batches.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gristmill_worker import process
from gristmill_worker.sources.base import Delivery

Entry = tuple[str, bytes]  # priority and entry ID, which two streams may have in common

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - memory, also where the disk is slow or full; checked below
THREADS: Final = 8
KEPT_S: Final = 3600.0  # a note of the dead that nobody took over from, for who is still to start
_LENGTH: Final = struct.Struct("<I")
_PART_BYTES: Final = 32 * 1024  # of one thread, for more than a thousand requests
_SEEN_DEAD: Final = 0o400  # mode of a note whose process was seen to be dead
_ANY: Final = 0xFFFFFFFF  # a length that says: it may be any of them


class BlackBox:
    """This process's note. Where none can be kept, none is found, and all that it held counts as suspect."""

    def __init__(self) -> None:
        self._path = _path(process.own())
        self._map: mmap.mmap | None = None
        self._parts: dict[int, int] = {}  # thread -> where its part begins
        self._lock = threading.Lock()

    def open(self) -> None:
        """Begin the note. Who inherits from this process removes it, so others have to know the process."""
        if self._path is not None and self._map is None:
            with suppress(OSError):
                self._map = _create(self._path)
            _sweep()

    @contextmanager
    def exposing(self, deliveries: Iterable[Delivery]) -> Iterator[None]:
        """Note that this thread has ``deliveries`` in native code while the block runs."""
        part = self._part()
        if self._map is None or part is None:
            yield
            return
        text = b" ".join(b"%s:%s" % (each.priority.encode(), each.entry_id) for each in deliveries)
        length = len(text) if len(text) <= _PART_BYTES - _LENGTH.size else _ANY
        if length != _ANY:
            self._map[part + _LENGTH.size : part + _LENGTH.size + length] = text
        _LENGTH.pack_into(self._map, part, length)  # last: until then nothing was in native code
        try:
            yield
        finally:
            _LENGTH.pack_into(self._map, part, 0)

    def close(self) -> None:
        """Remove the note: this process ends in good order, or the note would not be the whole truth."""
        if self._map is not None and self._path is not None:
            self._path.unlink(missing_ok=True)

    def _part(self) -> int | None:
        thread = threading.get_ident()
        if thread not in self._parts:
            with self._lock:
                number = len(self._parts)
                if number >= THREADS:
                    self.close()  # what this thread has is in no note: without one all is suspect
                    return None
                self._parts[thread] = number * _PART_BYTES
        return self._parts[thread]


def read(name: str) -> frozenset[Entry] | None:
    """Return what the process ``name``, which is dead, had in native code; None if that cannot be told."""
    path = _path(name)
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                return None  # anybody may write into that folder
            content = file.read(THREADS * _PART_BYTES)
    except OSError:
        return None
    entries: set[Entry] = set()
    for part in range(0, len(content), _PART_BYTES):
        (length,) = _LENGTH.unpack_from(content, part)
        if length > _PART_BYTES - _LENGTH.size:
            return None
        for word in content[part + _LENGTH.size : part + _LENGTH.size + length].split():
            priority, _, entry_id = word.partition(b":")
            entries.add((priority.decode(), entry_id))
    return frozenset(entries)


def remove(name: str) -> None:
    """Remove the note of a dead process that holds nothing any more."""
    path = _path(name)
    if path is not None:
        with suppress(OSError):
            path.unlink()


def _path(name: str) -> Path | None:
    """Return where a process of this host has its note; its name ends in its number and its start."""
    if not process.here() or not name.startswith(process.here()):
        return None
    number, _, started = name.removeprefix(process.here()).partition("/")
    if not (number.isdigit() and started.isdigit()):
        return None
    return FOLDER / f"gristmill-{os.getuid()}-{number}-{started}"


def _create(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        # Held by the map, so for as long as this process lives, whatever becomes of the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # All of it now: where the memory is short a write to a page that is not there would end the process.
        os.posix_fallocate(descriptor, 0, THREADS * _PART_BYTES)
        return mmap.mmap(descriptor, THREADS * _PART_BYTES)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _sweep() -> None:
    """Remove this user's notes of processes that died long ago, where no worker of their queue came after."""
    for path in FOLDER.glob(f"gristmill-{os.getuid()}-*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                _sweep_one(path, descriptor)
            finally:
                os.close(descriptor)


def _sweep_one(path: Path, descriptor: int) -> None:
    """Remove a note an hour after it was first seen that its process is dead; raises OSError.

    The lock tells who lives, not the number in the name: that may be of another container, which shares this
    folder and not our numbers. When it died is told by nothing, and who is to take over may only just start:
    so the first who sees it changes the note's mode, which dates it.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        return
    if time.time() - found.st_mtime < KEPT_S:
        return  # it may just be made, and not be locked yet
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if stat.S_IMODE(found.st_mode) != _SEEN_DEAD:
        os.fchmod(descriptor, _SEEN_DEAD)
    elif time.time() - found.st_ctime > KEPT_S:
        path.unlink()
