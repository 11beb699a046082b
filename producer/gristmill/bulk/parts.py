"""The parts of an output: files of rows, each whole once it has its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gristmill.bulk.disk import GrowingFile
from gristmill.bulk.kinds import Kind
from gristmill.bulk.rows import Row

OPEN: Final = ".open"


def part_name(number: int, kind: Kind) -> str:
    return f"part-{number:06d}{kind.extension}"


class Parts(ABC):
    """Files of rows in ``folder``, of which the last is still open: it grows, and can be cut back to a mark.

    A mark is what a checkpoint counts of an open part. :meth:`seal` gives a part its final content and name;
    it can still be opened again until :meth:`forget` is called, for a checkpoint that did not come about.
    """

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._folder = folder
        self._kind = kind
        self._file: GrowingFile | None = None
        self._final = self._growing = folder / "none"

    @abstractmethod
    def open(self, number: int, mark: int) -> None: ...
    @abstractmethod
    def add(self, row: Row, results: Mapping[str, Any]) -> None: ...
    @abstractmethod
    def save(self) -> int: ...
    @abstractmethod
    def seal(self) -> None: ...
    @abstractmethod
    def join(self, count: int, target: Path) -> None:
        """Write the parts 0 to ``count`` - 1 as one file."""

    def forget(self) -> None:
        self._growing.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _name(self, number: int) -> None:
        """Say which part is open, and so what its files are called."""
        self._final = self._folder / part_name(number, self._kind)
        self._growing = self._final.with_name(self._final.name + OPEN)

    def _open_file(self) -> GrowingFile:
        if self._file is None:
            raise RuntimeError("no part is open")
        return self._file

    def _close_synced(self) -> None:
        file = self._open_file()
        file.sync()
        file.close()
        self._file = None
