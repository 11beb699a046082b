"""Read CSV and JSON Lines files row by row; a row that cannot be read is an error of that row only."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, AnyStr, Final, Protocol, Self

import orjson

from gristmill.errors import InputFileError, InvalidRequestError
from gristmill.wire import is_text, json_type

STANDARD_INPUT: Final = Path("/dev/stdin")
MAX_FIELD_CHARS: Final = 16 * 1024 * 1024
MAX_LINE: Final = 64 * 1024 * 1024  # characters or bytes; a file with a longer line is of another kind

_BOM: Final = b"\xef\xbb\xbf"
_MISSING: Final = object()


class Format(StrEnum):
    """The formats, as a file name's extension."""

    CSV = ".csv"
    JSONL = ".jsonl"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the input.

    ``values`` is None where nothing of the row could be read; ``raw`` is a JSONL row's text, stripped.
    ``line`` counts from 1; ``position`` is the number of bytes of the file that were read so far.
    """

    values: dict[str, Any] | None
    line: int
    position: int
    error: InvalidRequestError | None = None
    raw: bytes | None = None

    def text(self, column: str) -> str:
        """Return the text in ``column``, or raise InvalidRequestError with the reason why there is none."""
        if self.error is not None:
            raise self.error
        value = (self.values or {}).get(column, _MISSING)
        if not isinstance(value, str):
            problem = "is missing" if value is _MISSING else f"is {json_type(value)}, it has to be a string"
            raise InvalidRequestError(f"line {self.line}: {column!r} {problem}")
        return value


class Reader(Protocol):
    """Iterates over the rows of a file, once; a context manager that closes the file.

    ``columns`` are the names that all rows share, None where each row has its own; ``size_bytes`` is the
    file's size, None where that is unknown. Raises InputFileError if the file as a whole is unusable.
    """

    columns: tuple[str, ...] | None
    size_bytes: int | None

    def __iter__(self) -> Iterator[Row]: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def close(self) -> None: ...


def file_format(path: Path) -> Format:
    """Return the format that the file's name tells; raise InputFileError if it tells none."""
    try:
        return Format(path.suffix.lower())
    except ValueError:
        raise InputFileError(f"{path}: the file's name has to end in {' or '.join(Format)}") from None


def open_reader(path: Path, kind: Format, *, delimiter: str = ",", same_columns: bool = False) -> Reader:
    """Open ``path``. With ``same_columns`` a JSONL row has an error if it has keys that the first lacks."""
    if kind is Format.CSV:
        return CsvReader(path, delimiter)
    if not same_columns:
        return JsonlReader(path)
    with JsonlReader(path) as reader:
        columns = next((tuple(row.values) for row in reader if row.values is not None), ())
    return JsonlReader(path, columns)


class _File:
    """An open binary file with what both readers need of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise InputFileError(f"{path} cannot be read: {error.strerror}") from error
        self._seekable = self._file.seekable()
        self.size_bytes = path.stat().st_size if self._seekable else None

    def _position(self) -> int:
        return self._file.tell() if self._seekable else 0

    def _lines(self, readline: Callable[[int], AnyStr]) -> Iterator[AnyStr]:
        number = 0
        while True:
            try:
                line = readline(MAX_LINE)
            except OSError as error:
                raise InputFileError(f"{self.path} cannot be read: {error.strerror}") from error
            if not line:
                return
            number += 1
            if len(line) >= MAX_LINE:
                raise InputFileError(f"{self.path}: line {number} is longer than {MAX_LINE >> 20} MiB")
            yield line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()


class CsvReader(_File):
    """Rows of a CSV file (RFC 4180, strict, with a header, blank lines skipped), all values strings.

    Bytes that are not UTF-8 become lone surrogates (PEP 383), so that they can be written unchanged.
    """

    columns: tuple[str, ...] | None

    def __init__(self, path: Path, delimiter: str = ",") -> None:
        super().__init__(path)
        self._delimiter = delimiter
        self._text = io.TextIOWrapper(self._file, "utf-8-sig", "surrogateescape", newline="")
        csv.field_size_limit(MAX_FIELD_CHARS)
        # Strict: a quote that is never closed is an error, it does not silently swallow the following rows.
        self._csv = csv.reader(self._lines(self._text.readline), delimiter=delimiter, strict=True)
        try:
            self._header = self._read_header()
        except BaseException:
            self._file.close()
            raise
        self.columns = self._header

    def _read_header(self) -> tuple[str, ...]:
        try:
            header = next((fields for fields in self._csv if fields), None)
        except csv.Error as error:
            raise InputFileError(f"{self.path}: the header is not valid CSV: {error}") from error
        if header is None:
            raise InputFileError(f"{self.path} is empty: its first line has to name the columns")
        if not is_text("".join(header)):
            raise InputFileError(f"{self.path}: the header is not valid UTF-8: save the file as UTF-8")
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise InputFileError(
                f"{self.path}: the header names a column twice: {', '.join(map(repr, twice))}"
            )
        return tuple(header)

    def __iter__(self) -> Iterator[Row]:
        while True:
            line = self._csv.line_num + 1
            try:
                fields = next(self._csv)
            except StopIteration:
                return
            except csv.Error as error:
                problem = InvalidRequestError(f"line {line} is not valid CSV: {error}")
                yield Row(None, line, self._position(), problem)
                continue
            if fields:
                yield self._row(fields, line)

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
        return Row(values, line, self._position(), error)


class JsonlReader(_File):
    """Rows of a JSON Lines file, one object a line, blank lines skipped.

    Where ``columns`` are given, a row with other keys has an error.
    """

    def __init__(self, path: Path, columns: tuple[str, ...] | None = None) -> None:
        super().__init__(path)
        self.columns = columns

    def __iter__(self) -> Iterator[Row]:
        for number, line in enumerate(self._lines(self._file.readline), start=1):
            raw = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if raw:
                values, problem = self._parse(raw)
                error = InvalidRequestError(f"line {number}: {problem}") if problem else None
                yield Row(values, number, self._position(), error, raw)

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
