"""Labelled rows, scored pairs, and texts alone, from a CSV, TSV or JSON Lines file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from gristmill.bulk.readers import MAX_FIELD_CHARS
from gristmill.bulk.source import open_rows
from gristmill.errors import InputFileError, InvalidRequestError
from gristmill.wire import json_type

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = {".jsonl", ".ndjson"}


@dataclass(frozen=True)
class Labelled:
    """Texts and their labels, in the file's order; exact repetitions are left out and counted."""

    source: str  # the file's name
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    repeated: int


def read_labelled(path: Path, text_column: str, label_column: str) -> Labelled:
    """Read every row of ``path``, by its ending: .csv, .tsv, .jsonl or .ndjson (UTF-8).

    Raises :class:`InputFileError` for a file that cannot be read and, naming the line, for a missing column
    and an empty text or label.
    """
    pairs: dict[tuple[str, str], None] = {}
    total = 0
    with _readable(path):
        for line, row in _rows(path):
            pairs[_field(path, line, row, text_column), _field(path, line, row, label_column).strip()] = None
            total += 1
    if not pairs:
        raise InputFileError(f"{path} has no rows")
    texts, labels = zip(*pairs, strict=True)
    return Labelled(path.name, texts, labels, total - len(pairs))


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs of texts and how alike people found them, on any scale; in the file's order."""

    source: str  # the file's name
    first: tuple[str, ...]
    second: tuple[str, ...]
    scores: tuple[float, ...]


def read_pairs(path: Path, columns: tuple[str, str], score_column: str) -> ScoredPairs:
    """Read every row of ``path`` as :func:`read_labelled` does; a score is a finite number."""
    rows = []
    with _readable(path):
        for line, row in _rows(path):
            first, second = (_field(path, line, row, column) for column in columns)
            rows.append((first, second, _number(path, line, row, score_column)))
    if not rows:
        raise InputFileError(f"{path} has no rows")
    firsts, seconds, scores = zip(*rows, strict=True)
    return ScoredPairs(path.name, firsts, seconds, scores)


def column_texts(path: Path, column: str, rows: int) -> Iterator[str | None]:
    """Yield the text in a column of the first ``rows`` rows; None for a row without one."""
    with open_rows(path) as reader:
        for row in islice(reader, rows):
            try:
                yield row.text(column)
            except InvalidRequestError:
                yield None


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path} is not UTF-8: {error}") from error
    except csv.Error as error:
        raise InputFileError(f"{path} is not valid CSV: {error}") from error


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    kind = path.suffix.lower()
    if kind in _DELIMITERS:
        with path.open(encoding="utf-8-sig", newline="") as file:
            csv.field_size_limit(MAX_FIELD_CHARS)
            reader = csv.DictReader(file, delimiter=_DELIMITERS[kind], strict=True)
            for row in reader:
                yield reader.line_num, row
    elif kind in _JSON_LINES:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _json_row(path, number, line)
    else:
        raise InputFileError(f"{path} has an unknown ending: use .csv, .tsv, .jsonl or .ndjson")


def _json_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputFileError(f"{path}, line {number}, is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputFileError(f"{path}, line {number}, is {json_type(row)}, it has to be an object")
    return row


def _number(path: Path, line: int, row: dict[str, Any], column: str) -> float:
    value = row.get(column)
    try:
        number = float(value if isinstance(value, float) else _field(path, line, row, column))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputFileError(f"{path}, line {line}: {column!r} is {value!r}, it has to be a finite number")
    return number


def _field(path: Path, line: int, row: dict[str, Any], column: str) -> str:
    if column not in row:
        known = ", ".join(repr(name) for name in row if name is not None)
        raise InputFileError(f"{path}, line {line}, has no column {column!r}, only {known}")
    value = row[column]
    if isinstance(value, bool | int):
        value = str(value)  # class numbers are labels too
    if not isinstance(value, str):
        found = "missing" if value is None else json_type(value)
        raise InputFileError(f"{path}, line {line}: {column!r} is {found}, it has to be a string")
    if not value.strip():
        raise InputFileError(f"{path}, line {line}: {column!r} is empty")
    return value
