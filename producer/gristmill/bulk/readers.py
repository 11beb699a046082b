"""Read CSV and JSON Lines row by row; a row that cannot be read is an error of that row only."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol, Self

import orjson

from gristmill.bulk.files import ByteStream, Input
from gristmill.bulk.kinds import Format
from gristmill.bulk.rows import BEGINNING, Place, Row
from gristmill.errors import InputFileError, InvalidRequestError
from gristmill.wire import is_text, json_type

MAX_FIELD_CHARS: Final = 16 * 1024 * 1024
MAX_LINE: Final = 64 * 1024 * 1024  # bytes; a file with a longer line is of another kind

_BOM: Final = b"\xef\xbb\xbf"


class Reader(Protocol):
    """Iterates over the rows of a file, once; a context manager that closes the file.

    ``columns`` are the names that all rows share, None where each row has its own; ``taken`` is how much of
    the file's size was read. Raises InputFileError if the file as a whole is unusable.
    """

    columns: tuple[str, ...] | None

    @property
    def taken(self) -> int: ...
    def __iter__(self) -> Iterator[Row]: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def lines(name: str, chunks: Iterable[bytes], *, any_ending: bool) -> Iterator[bytes]:
    """Yield lines with their endings: a line feed, or with ``any_ending`` also what CSV files may have."""
    held: list[bytes] = []  # of a line that is not complete yet
    held_bytes = number = 0
    for chunk in chunks:
        held.append(chunk)
        held_bytes += len(chunk)
        ends = b"\n" in chunk or (any_ending and b"\r" in chunk) or (any_ending and held[0][-1:] == b"\r")
        found: list[bytes] = []
        if ends:
            data = b"".join(held)
            found = data.splitlines(keepends=True) if any_ending else io.BytesIO(data).readlines()
            # A carriage return at the end may be half of an ending.
            held = [] if found[-1].endswith(b"\n") else [found.pop()]
            held_bytes = len(held[0]) if held else 0
        for line in found:
            number += 1
            if len(line) >= MAX_LINE:
                raise _too_long(name, number)
            yield line
        if held_bytes >= MAX_LINE:
            raise _too_long(name, number + 1)
    if held:
        yield b"".join(held)


def _too_long(name: str, number: int) -> InputFileError:
    return InputFileError(f"{name}: line {number} is longer than {MAX_LINE >> 20} MiB")


class _File:
    """What both readers need of their file."""

    def __init__(self, source: Input, start: Place) -> None:
        self.source = source
        self._start = start
        self._offset = start.offset
        self._stream = ByteStream(source, start.offset)

    @property
    def taken(self) -> int:
        return self._stream.taken

    def _lines(self, *, any_ending: bool) -> Iterator[bytes]:
        for line in lines(self.source.name, self._stream, any_ending=any_ending):
            self._offset += len(line)
            yield line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.__exit__()


class CsvReader(_File):
    """Rows of a CSV file (RFC 4180, strict, with a header, blank lines skipped), all values strings.

    Bytes that are not UTF-8 become lone surrogates (PEP 383), so that they can be written unchanged.
    """

    columns: tuple[str, ...] | None

    def __init__(
        self,
        source: Input,
        start: Place = BEGINNING,
        *,
        delimiter: str | None = None,
        header: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(source, start)
        self._delimiter = delimiter or source.kind.delimiter
        csv.field_size_limit(MAX_FIELD_CHARS)
        # Strict: a quote that is never closed is an error, it does not silently swallow the following rows.
        self._csv = csv.reader(self._texts(), delimiter=self._delimiter, strict=True)
        self._before = 0
        try:
            if start.offset and header is None:
                with CsvReader(source, delimiter=delimiter) as beginning:
                    header = beginning.columns
            self._header = self._read_header() if not start.offset or header is None else header
        except BaseException:
            self._stream.__exit__()
            raise
        self.columns = self._header

    def _texts(self) -> Iterator[str]:
        first = self._offset == 0
        for line in self._lines(any_ending=True):
            yield (line.removeprefix(_BOM) if first else line).decode("utf-8", "surrogateescape")
            first = False

    def _read_header(self) -> tuple[str, ...]:
        name = self.source.name
        try:
            header = next((fields for fields in self._csv if fields), None)
        except csv.Error as error:
            raise InputFileError(f"{name}: the header is not valid CSV: {error}") from error
        if header is None:
            raise InputFileError(f"{name} is empty: its first line has to name the columns")
        if not is_text("".join(header)):
            raise InputFileError(f"{name}: the header is not valid UTF-8: save the file as UTF-8")
        twice = sorted({column for column in header if header.count(column) > 1})
        if twice:
            raise InputFileError(f"{name}: the header names a column twice: {', '.join(map(repr, twice))}")
        return tuple(header)

    def __iter__(self) -> Iterator[Row]:
        while True:
            line = self._start.lines + self._csv.line_num + 1
            self._before = self._offset
            try:
                fields = next(self._csv)
            except StopIteration:
                return
            except csv.Error as error:
                problem = InvalidRequestError(f"line {line} is not valid CSV: {error}")
                yield Row(None, line, self._end(), problem, size=self._offset - self._before)
                continue
            if fields:
                yield self._row(fields, line)

    def _end(self) -> Place:
        return Place(self._start.file, self._offset, self._start.lines + self._csv.line_num)

    def _row(self, fields: list[str], line: int) -> Row:
        found, expected = len(fields), len(self._header)
        error = None
        if not is_text("".join(fields)):
            error = InvalidRequestError(f"line {line}: not valid UTF-8")
        elif found != expected:
            error = InvalidRequestError(f"line {line} has {found} fields, the header has {expected}")
        if found > expected:  # nothing is dropped
            fields[expected - 1 :] = [self._delimiter.join(fields[expected - 1 :])]
        values = dict.fromkeys(self._header, "") | dict(zip(self._header, fields, strict=False))
        return Row(values, line, self._end(), error, size=self._offset - self._before)


class JsonlReader(_File):
    """Rows of a JSON Lines file, one object a line, blank lines skipped.

    Where ``columns`` are given, a row with other keys has an error.
    """

    def __init__(
        self, source: Input, start: Place = BEGINNING, *, columns: tuple[str, ...] | None = None
    ) -> None:
        super().__init__(source, start)
        self.columns = columns

    def __iter__(self) -> Iterator[Row]:
        for number, line in enumerate(self._lines(any_ending=False), start=self._start.lines + 1):
            raw = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if raw:
                values, problem = self._parse(raw)
                error = InvalidRequestError(f"line {number}: {problem}") if problem else None
                end = Place(self._start.file, self._offset, number)
                yield Row(values, number, end, error, raw, len(line))

    def _parse(self, raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
        problem = None
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text, problem = raw.decode(errors="replace"), "not valid UTF-8"
        try:
            values = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            return None, problem or f"not valid JSON: {error}"
        if not isinstance(values, dict):
            return None, problem or f"the row is {json_type(values)}, it has to be a JSON object"
        if self.columns is not None and (other := values.keys() - self.columns):
            problem = problem or f"the first row does not have {', '.join(map(repr, sorted(other)))}"
        return values, problem


def first_columns(source: Input) -> tuple[str, ...]:
    """Return the keys of the first readable row of a JSON Lines file."""
    with JsonlReader(source) as reader:
        return next((tuple(row.values) for row in reader if row.values is not None), ())


def is_csv(source: Input) -> bool:
    return source.kind.format in (Format.CSV, Format.TSV)
