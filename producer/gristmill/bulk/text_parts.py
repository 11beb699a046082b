"""The parts of a CSV or JSON Lines output, each a file of its own with its header."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast

from gristmill.bulk.disk import GrowingFile, disk_errors, put_name, sync
from gristmill.bulk.encoders import Encoder
from gristmill.bulk.kinds import Compression, Kind
from gristmill.bulk.parts import OPEN, Parts, part_name
from gristmill.bulk.rows import Row
from gristmill.console import needs_extra

COPY_BYTES: Final = 1 << 20


class TextParts(Parts):
    """An open part is not compressed; its mark is its size in bytes."""

    def __init__(self, folder: Path, kind: Kind, encoder: Encoder) -> None:
        super().__init__(folder, kind)
        self._encoder = encoder
        self._header = encoder.header()

    def open(self, number: int, mark: int) -> None:
        self._name(number)
        with disk_errors(self._final):
            if self._kind.compression is Compression.NONE and mark and self._final.exists():
                self._final.replace(self._growing)  # it was sealed, and the checkpoint did not come about
        self._file = GrowingFile(self._growing, mark)
        if not mark:
            self._file.write(self._header)

    def add(self, row: Row, results: Mapping[str, Any]) -> None:
        self._open_file().write(self._encoder.row(row, results))

    def save(self) -> int:
        return self._open_file().sync()

    def seal(self) -> None:
        self._close_synced()
        with disk_errors(self._final):
            if self._kind.compression is Compression.NONE:
                put_name(self._growing, self._final)
            else:
                self._compress()

    def _compress(self) -> None:
        temporary = self._final.with_name(self._final.name + ".tmp")
        with self._growing.open("rb") as rows, temporary.open("wb") as packed:
            packed.write(self._packed_header())
            rows.seek(len(self._header))
            packer = _packer(self._kind.compression)
            while chunk := rows.read(COPY_BYTES):
                packed.write(packer.compress(chunk))
            packed.write(packer.flush())
            sync(packed)
        put_name(temporary, self._final)

    def _packed_header(self) -> bytes:
        """Return the header as a member of its own, so that parts can be joined without unpacking them."""
        if self._kind.compression is Compression.NONE or not self._header:
            return self._header
        packer = _packer(self._kind.compression)
        return packer.compress(self._header) + packer.flush()

    def join(self, count: int, target: Path) -> None:
        """Write the parts 0 to ``count`` - 1 as one file with one header."""
        header = len(self._packed_header())
        with disk_errors(target), target.open("wb") as whole:
            for number in range(count):
                with (self._folder / part_name(number, self._kind)).open("rb") as part:
                    part.seek(header if number else 0)
                    shutil.copyfileobj(part, whole, COPY_BYTES)
            sync(whole)


class Packer(Protocol):
    """What zlib and zstandard offer alike."""

    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def _packer(compression: Compression) -> Packer:
    if compression is Compression.GZIP:
        return zlib.compressobj(6, wbits=31)  # the header of gzip, without a time: the same bytes each time
    with needs_extra("bulk"):
        import zstandard  # noqa: PLC0415 - an extra
    return cast("Packer", zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj())


class StreamOut:
    """Rows as they come, to standard output; nothing can be resumed."""

    def __init__(self, file: BinaryIO, kind: Kind, encoder: Encoder) -> None:
        self._file = file
        self._encoder = encoder
        self._packer = None if kind.compression is Compression.NONE else _packer(kind.compression)
        self._write(encoder.header())

    def add(self, row: Row, results: Mapping[str, Any]) -> None:
        self._write(self._encoder.row(row, results))

    def _write(self, data: bytes) -> None:
        with disk_errors("standard output"):
            self._file.write(data if self._packer is None else self._packer.compress(data))
            self._file.flush()

    def end(self) -> None:
        """Write what a compressor still holds."""
        if self._packer is not None:
            with disk_errors("standard output"):
                self._file.write(self._packer.flush())
                self._file.flush()


def remove_leftovers(folder: Path, kind: Kind, sealed: int) -> None:
    """Delete temporary files, and open files of parts that are sealed."""
    for path in folder.glob("*.tmp"):
        path.unlink()
    for number in (sealed - 1,):
        with suppress(FileNotFoundError):
            (folder / (part_name(number, kind) + OPEN)).unlink()
