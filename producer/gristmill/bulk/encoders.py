"""Rows with their results as the bytes of a CSV or JSON Lines file.

Bytes that are not UTF-8 pass unchanged from CSV to CSV and from JSONL to JSONL. From one format to the other
they become U+FFFD, as no reader of the other format would take them.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from gristmill.bulk.rows import Row


class Encoder(Protocol):
    """Turns rows with their results into the bytes of a file."""

    def header(self) -> bytes: ...
    def row(self, row: Row, results: Mapping[str, Any]) -> bytes: ...


class CsvEncoder:
    def __init__(self, columns: Sequence[str], results: Sequence[str], delimiter: str) -> None:
        self._columns = columns
        self._results = results
        self._buffer = io.StringIO(newline="")
        self._csv = csv.writer(self._buffer, delimiter=delimiter, lineterminator="\n")
        self._quoting_csv = csv.writer(
            self._buffer, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL
        )

    def header(self) -> bytes:
        return self._encode([*self._columns, *self._results])

    def row(self, row: Row, results: Mapping[str, Any]) -> bytes:
        values = row.values or {}
        cells = [as_text(values.get(name)) for name in self._columns]
        return self._encode(cells + [as_text(results.get(name)) for name in self._results])

    def _encode(self, cells: list[str]) -> bytes:
        # The csv module quotes a carriage return only where it is part of its own line ending.
        writer = self._quoting_csv if any("\r" in cell for cell in cells) else self._csv
        self._buffer.seek(0)
        self._buffer.truncate()
        writer.writerow(cells)
        return self._buffer.getvalue().encode("utf-8", "surrogateescape")


class JsonlEncoder:
    """``columns`` of None passes all that a row has, in the input's own text if it is JSON."""

    def __init__(self, columns: Sequence[str] | None, results: Sequence[str], line_column: str) -> None:
        self._columns = columns
        self._results = results
        self._line_column = line_column

    def header(self) -> bytes:
        return b""

    def row(self, row: Row, results: Mapping[str, Any]) -> bytes:
        added = {name: results.get(name) for name in self._results}
        if row.values is None:
            return to_json({self._line_column: row.line, **added}) + b"\n"
        if row.raw is not None and self._columns is None:
            # The input's own text, not a copy: numbers, order and odd bytes stay as they are.
            comma = b"," if row.values and added else b""
            return row.raw[:-1].rstrip() + comma + to_json(added)[1:] + b"\n"
        names = row.values if self._columns is None else [n for n in self._columns if n in row.values]
        return to_json({name: valid(row.values[name]) for name in names} | added) + b"\n"


def as_text(value: Any) -> str:
    """Return what stands for ``value`` in a cell of text: itself, nothing for None, else its JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else to_json(value).decode()


def valid(text: Any) -> Any:
    """Return ``text`` with its undecodable bytes replaced."""
    if not isinstance(text, str) or text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def to_json(value: Any) -> bytes:
    """Return ``value`` as JSON, also where Parquet knows a type that JSON does not."""
    return orjson.dumps(value, default=_other, option=orjson.OPT_NON_STR_KEYS)


def _other(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
