"""Which format and compression a file has, told by its name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gristmill.errors import InputFileError


class Format(StrEnum):
    """The formats, as a file name's extension."""

    CSV = ".csv"
    TSV = ".tsv"
    JSONL = ".jsonl"
    PARQUET = ".parquet"


class Compression(StrEnum):
    """The compressions of text formats, as a file name's last extension."""

    NONE = ""
    GZIP = ".gz"
    ZSTD = ".zst"


_ALSO: Final = {".ndjson": Format.JSONL}
NAMES: Final = f"{', '.join(Format)}; each of the first three also with .gz or .zst"


@dataclass(frozen=True, slots=True)
class Kind:
    """A format with its compression."""

    format: Format
    compression: Compression = Compression.NONE

    @property
    def extension(self) -> str:
        return f"{self.format}{self.compression}"

    @property
    def delimiter(self) -> str:
        return "\t" if self.format is Format.TSV else ","

    @property
    def has_header(self) -> bool:
        return self.format in (Format.CSV, Format.TSV)


def kind_of(name: str) -> Kind:
    """Return the kind that ``name`` ends with; raise InputFileError if it tells none."""
    rest = name.lower()
    compression = Compression.NONE
    for known in (Compression.GZIP, Compression.ZSTD):
        if rest.endswith(known):
            compression, rest = known, rest.removesuffix(known)
    for extension, form in ({form.value: form for form in Format} | _ALSO).items():
        if rest.endswith(extension):
            if form is Format.PARQUET and compression:
                raise InputFileError(f"{name}: Parquet compresses its columns itself; name it .parquet")
            return Kind(form, compression)
    raise InputFileError(f"{name}: the file's name has to end in one of {NAMES}; or name its format")
