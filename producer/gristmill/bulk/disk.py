"""Files that survive a power cut: what was told to be on the disk is there, under its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gristmill.errors import InputFileError


@contextmanager
def disk_errors(path: Path | str) -> Iterator[None]:
    """Turn an OSError in the block into InputFileError."""
    try:
        yield
    except OSError as error:
        raise InputFileError(f"{path} cannot be written: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Have the names in ``folder`` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_name(temporary: Path, final: Path) -> None:
    """Give a file that is on the disk its final name, so that a crash leaves either all of it or none."""
    temporary.replace(final)
    sync_folder(final.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file ``path``: after a crash it holds either what it held or ``data``."""
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path):
        with temporary.open("wb") as file:
            file.write(data)
            sync(file)
        put_name(temporary, path)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class GrowingFile:
    """A file that grows, and is first cut back to ``size`` bytes: what a checkpoint counts of it."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        with disk_errors(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            self._file = os.fdopen(os.open(path, flags, 0o666), "ab")
            try:
                self._cut(size)
            except BaseException:
                self._file.close()
                raise
        self.size = size

    def _cut(self, size: int) -> None:
        there = os.fstat(self._file.fileno()).st_size
        if there < size:
            raise InputFileError(
                f"{self.path} has {there} bytes, the checkpoint counts {size}: it was damaged; "
                "use --force to start afresh"
            )
        self._file.truncate(size)

    def write(self, data: bytes) -> None:
        with disk_errors(self.path):
            self._file.write(data)
        self.size += len(data)

    def sync(self) -> int:
        """Have all of it on the disk; returns its size in bytes."""
        with disk_errors(self.path):
            sync(self._file)
        return self.size

    def close(self) -> None:
        with disk_errors(self.path):
            self._file.close()
