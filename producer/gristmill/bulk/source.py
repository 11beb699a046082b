"""The rows of all inputs as one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

from gristmill.bulk.files import Input, find_inputs
from gristmill.bulk.json_types import SAMPLE_ROWS, find_types, fitted
from gristmill.bulk.kinds import Format
from gristmill.bulk.readers import CsvReader, JsonlReader, Reader, first_columns, is_csv
from gristmill.bulk.rows import BEGINNING, Place, Row
from gristmill.errors import InputFileError


def open_rows(path: Path, *needed: str) -> Source:
    """Open one file of rows; raises InputFileError, also if it lacks a column of ``needed``."""
    return Source(find_inputs([str(path)], None), BEGINNING, delimiter=None, same_columns=False, texts=needed)


class Source:
    """Iterates over the rows of ``inputs`` from ``start`` on, once; a context manager.

    ``columns`` are the names that all rows share, None where each row has its own. With ``same_columns`` they
    always share them: a JSONL row has an error if it has keys that the first row of the first file lacks.
    ``size_bytes`` is the size of all inputs, None where it is unknown. ``texts`` are the columns to score and
    ``passed`` those to pass on (None: all). With ``arrow`` the rows go into a Parquet file: they keep the
    types of the first file, those from Parquet have only ``texts`` as Python values. ``limit`` is the number
    of rows to end after (None: all).

    Raises InputFileError where a file cannot be used or lacks a column.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        start: Place,
        *,
        delimiter: str | None,
        same_columns: bool,
        texts: Sequence[str],
        passed: Sequence[str] | None = None,
        arrow: bool = False,
        limit: int | None = None,
    ) -> None:
        self._limit = limit
        self._inputs = inputs
        self._delimiter = delimiter
        self._same_columns = same_columns
        self._texts = texts
        self._passed = passed
        self._arrow = arrow
        self._schema: Any = None  # of the first Parquet file
        self._behind = sum(one.size_bytes or 0 for one in inputs[: start.file])
        sizes = [one.size_bytes for one in inputs]
        self.size_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self.columns: tuple[str, ...] | None = None
        if start.file:  # the names are the first file's, wherever the reading goes on
            with self._reader(BEGINNING) as reader:
                self.columns = reader.columns
        self._reading: Reader = self._reader(start)
        first = inputs[0]
        self._types = first_types(first) if arrow and first.kind.format is Format.JSONL else {}
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
        return islice(self._all(), self._limit)

    def _all(self) -> Iterator[Row]:
        while True:
            if self._types:
                yield from (fitted(row, self._types) for row in self._reading)
            else:
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
            self._check(one, reader)
        except BaseException:
            reader.__exit__()
            raise
        return reader

    def _opened(self, one: Input, start: Place) -> Reader:
        if is_csv(one):
            return CsvReader(one, start, delimiter=self._delimiter if one.kind.format is Format.CSV else None)
        if one.kind.format is Format.PARQUET:
            from gristmill.bulk.parquet import ParquetReader  # noqa: PLC0415 - an extra

            wanted = None if self._passed is None else (*self._texts, *self._passed)
            return ParquetReader(one, start, columns=wanted, converted=self._texts if self._arrow else None)
        if not self._same_columns:
            return JsonlReader(one, start)
        return JsonlReader(one, start, columns=self.columns or first_columns(one))

    def fields(self) -> list[Any]:
        """Return the Arrow fields of the columns that are passed on."""
        from gristmill.bulk.parquet import fields_of_text  # noqa: PLC0415 - an extra

        names = (self.columns or ()) if self._passed is None else self._passed
        if self._schema is not None:
            return [self._schema.field(name) for name in names]
        return fields_of_text(names, self._types)

    def _check(self, one: Input, reader: Reader) -> None:
        columns = reader.columns
        if columns is None:
            return
        for column in (*self._texts, *(self._passed or ())):
            if column not in columns:
                listed = ", ".join(map(repr, columns)) or "none"
                raise InputFileError(f"{one.name} has no column {column!r}; its columns are: {listed}")
        if self._same_columns and self.columns is not None and set(columns) != set(self.columns):
            listed = ", ".join(map(repr, sorted(set(columns) ^ set(self.columns))))
            raise InputFileError(
                f"{one.name} has other columns than {self._inputs[0].name}: they differ in {listed}"
            )
        self.columns = self.columns or columns
        if self._arrow and one.kind.format is Format.PARQUET:
            schema: Any = getattr(reader, "schema", None)
            self._schema = self._schema or schema
            names = self.columns if self._passed is None else self._passed
            if other := [name for name in names if schema.field(name).type != self._schema.field(name).type]:
                raise InputFileError(
                    f"{one.name} has other types than {self._inputs[0].name}: {', '.join(map(repr, other))}"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.__exit__()


def first_types(one: Input) -> dict[str, str]:
    """Return the types of a JSON Lines file's columns, by its first rows."""
    with JsonlReader(one) as reader:
        return find_types(row.values for row in islice(reader, SAMPLE_ROWS) if row.values is not None)
