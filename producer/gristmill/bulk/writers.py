"""Write scored rows as CSV or JSON Lines: to ``OUT.part`` first, which becomes ``OUT`` when all is done.

Bytes that are not UTF-8 pass unchanged from CSV to CSV and from JSONL to JSONL. From one format to the other
they become U+FFFD, as no reader of the other format would take them.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Protocol, Self

import orjson

from gristmill.bulk.readers import Format, Row
from gristmill.errors import InputFileError


def check_output(source: Path, out: Path, *, force: bool) -> None:
    """Raise InputFileError if ``out`` cannot or must not be written."""
    if not out.parent.is_dir():
        raise InputFileError(f"{out}: the folder {out.parent} does not exist")
    if not out.exists():
        return
    if not out.is_file():
        raise InputFileError(f"{out} is not a file")
    if source.exists() and out.samefile(source):
        raise InputFileError(f"{out} is the input file: choose another name for the output")
    if not force:
        raise InputFileError(f"{out} exists already: use --force to replace it")


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
        cells = [_cell(values.get(name)) for name in self._columns]
        return self._encode(cells + [_cell(results.get(name)) for name in self._results])

    def _encode(self, cells: list[str]) -> bytes:
        # The csv module quotes a carriage return only where it is part of its own line ending.
        writer = self._quoting_csv if any("\r" in cell for cell in cells) else self._csv
        self._buffer.seek(0)
        self._buffer.truncate()
        writer.writerow(cells)
        return self._buffer.getvalue().encode("utf-8", "surrogateescape")


class JsonlEncoder:
    def __init__(self, results: Sequence[str], line_column: str) -> None:
        self._results = results
        self._line_column = line_column

    def header(self) -> bytes:
        return b""

    def row(self, row: Row, results: Mapping[str, Any]) -> bytes:
        added = {name: results.get(name) for name in self._results}
        if row.values is None:
            return orjson.dumps({self._line_column: row.line, **added}) + b"\n"
        if row.raw is not None:
            # The input's own text, not a copy: numbers, order and odd bytes stay as they are.
            comma = b"," if row.values else b""
            return row.raw[:-1].rstrip() + comma + orjson.dumps(added)[1:] + b"\n"
        return orjson.dumps({name: _valid(value) for name, value in row.values.items()} | added) + b"\n"


class Writer:
    """Writes the rows of one run to ``part``; :meth:`commit` gives the file its name. A context manager.

    ``columns`` are the input's (None: each row has its own) and are followed by ``results``, the names of the
    result columns. Raises InputFileError where names collide or where another run writes the same file.
    """

    def __init__(
        self,
        out: Path,
        kind: Format,
        columns: Sequence[str] | None,
        results: Sequence[str],
        *,
        line_column: str,
        delimiter: str = ",",
    ) -> None:
        if taken := {*(columns or ())} & {*results, line_column}:
            raise InputFileError(_collision(taken, "the input"))
        self._out = out
        self.part = out.with_name(out.name + ".part")
        self._encoder: Encoder = (
            CsvEncoder(columns or (), results, delimiter)
            if kind is Format.CSV
            else JsonlEncoder(results, line_column)
        )
        self._file = _open_locked(self.part)
        self._put(self._encoder.header())

    def write(self, row: Row, results: Mapping[str, Any]) -> None:
        """Write one row; ``results`` that are not given stay empty."""
        self._put(self._encoder.row(row, results))

    def _put(self, data: bytes) -> None:
        with _disk_errors(self.part):
            self._file.write(data)

    def commit(self) -> None:
        """Close the file and give it its final name, so that a crash leaves either all of it or none."""
        with _disk_errors(self.part):
            self._file.flush()
            os.fsync(self._file.fileno())
            self.part.replace(self._out)
            self._file.close()
            folder = os.open(self._out.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        # What still lies in the buffer of a full disk's file fails once more: the first error counts.
        with suppress(InputFileError) if error else nullcontext(), _disk_errors(self.part):
            self._file.close()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputFileError(f"{path} cannot be written: {error.strerror}") from error


def _open_locked(path: Path) -> IO[bytes]:
    """Open ``path`` empty; never through a link, so that nothing but a file of ours is emptied."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    with _disk_errors(path), ExitStack() as undo:
        file = undo.enter_context(os.fdopen(os.open(path, flags, 0o666), "ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputFileError(f"{path}: another run is writing this file") from None
        file.truncate(0)  # fails where it is a device or a pipe
        undo.pop_all()
    return file


def _collision(names: set[str], where: str) -> str:
    listed = ", ".join(map(repr, sorted(names)))
    return f"{where} has a column {listed}, which is also a result's: choose another --prefix"


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value).decode()


def _valid(text: Any) -> Any:
    """Return ``text`` with its undecodable bytes replaced."""
    if not isinstance(text, str) or text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
