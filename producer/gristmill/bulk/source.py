"""The rows of all inputs as one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from gristmill.bulk.files import Input, find_inputs
from gristmill.bulk.kinds import Format
from gristmill.bulk.readers import CsvReader, JsonlReader, Reader, first_columns, is_csv
from gristmill.bulk.rows import BEGINNING, Place, Row
from gristmill.errors import InputFileError


def open_rows(path: Path, *needed: str) -> Source:
    """Open one file of rows; raises InputFileError, also if it lacks a column of ``needed``."""
    return Source(
        find_inputs([str(path)], None), BEGINNING, delimiter=None, same_columns=False, needed=needed
    )


class Source:
    """Iterates over the rows of ``inputs`` from ``start`` on, once; a context manager.

    ``columns`` are the names that all rows share, None where each row has its own. With ``same_columns`` they
    always share them: a JSONL row has an error if it has keys that the first row of the first file lacks.
    ``size_bytes`` is the size of all inputs, None where it is unknown. Raises InputFileError where a file
    cannot be used or lacks a column of ``needed``.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        start: Place,
        *,
        delimiter: str | None,
        same_columns: bool,
        needed: Sequence[str],
    ) -> None:
        self._inputs = inputs
        self._delimiter = delimiter
        self._same_columns = same_columns
        self._needed = needed
        self._behind = sum(one.size_bytes or 0 for one in inputs[: start.file])
        sizes = [one.size_bytes for one in inputs]
        self.size_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self.columns: tuple[str, ...] | None = None
        if start.file:  # the names are the first file's, wherever the reading goes on
            with self._reader(Place()) as first:
                self.columns = first.columns
        self._reading: Reader = self._reader(start)
        self._file = start.file

    @property
    def position(self) -> int:
        """The number of stored bytes of the inputs that were read so far."""
        return self._behind + self._reading.taken

    def check(self) -> None:
        """Open every input and close it again: what is wrong with one is said before the work begins."""
        with self:
            for number in range(self._file + 1, len(self._inputs)):
                self._reader(Place(number)).__exit__()

    def __iter__(self) -> Iterator[Row]:
        while True:
            yield from self._reading
            self._reading.__exit__()
            if self._file + 1 == len(self._inputs):
                return
            self._behind += self._inputs[self._file].size_bytes or 0
            self._file += 1
            self._reading = self._reader(Place(self._file))

    def _reader(self, start: Place) -> Reader:
        one = self._inputs[start.file]
        reader = self._opened(one, start)
        try:
            self._check(one, reader.columns)
        except BaseException:
            reader.__exit__()
            raise
        return reader

    def _opened(self, one: Input, start: Place) -> Reader:
        if is_csv(one):
            return CsvReader(one, start, delimiter=self._delimiter if one.kind.format is Format.CSV else None)
        if not self._same_columns:
            return JsonlReader(one, start)
        return JsonlReader(one, start, columns=self.columns or first_columns(one))

    def _check(self, one: Input, columns: tuple[str, ...] | None) -> None:
        if columns is None:
            return
        for column in self._needed:
            if column not in columns:
                listed = ", ".join(map(repr, columns)) or "none"
                raise InputFileError(f"{one.name} has no column {column!r}; its columns are: {listed}")
        if self._same_columns and self.columns is not None and set(columns) != set(self.columns):
            listed = ", ".join(map(repr, sorted(set(columns) ^ set(self.columns))))
            raise InputFileError(
                f"{one.name} has other columns than {self._inputs[0].name}: they differ in {listed}"
            )
        self.columns = self.columns or columns

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.__exit__()
