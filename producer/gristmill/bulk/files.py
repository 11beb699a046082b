"""Inputs: local files, globs, standard input and URLs, as streams of uncompressed bytes."""

from __future__ import annotations

import glob
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, Self, cast

from gristmill.bulk.kinds import Compression, Kind, kind_of
from gristmill.console import needs_extra
from gristmill.errors import InputFileError

STANDARD_STREAM: Final = "-"
CHUNK: Final = 256 * 1024
COMPRESSED_CHUNK: Final = 16 * 1024  # what it unpacks to is held at once
MOST_ZSTD_WINDOW: Final = 1 << 27  # what the command zstd takes without --long

_VERSION_FIELDS: Final = (
    "etag",
    "ETag",
    "md5",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)


@dataclass(frozen=True, slots=True)
class Input:
    """One file to score: a path, a URL or "-". ``version`` is what changes when its content does."""

    name: str
    kind: Kind
    size_bytes: int | None = None
    version: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return what is the same as long as the file is."""
        return {
            "name": self.name,
            "format": self.kind.extension,
            "size": self.size_bytes,
            "version": self.version,
        }

    @property
    def web(self) -> bool:
        return self.name.startswith(("http://", "https://"))

    @property
    def piped(self) -> bool:
        return self.name == STANDARD_STREAM

    def open(self, *, forward: bool = False) -> BinaryIO:
        """Open it for reading bytes as they are stored; raises InputFileError.

        ``forward``: from the beginning to the end only, which is all that many web servers can do.
        """
        if is_url(self.name):
            streamed = {"block_size": 0} if forward and self.web else {}
            with remote_errors(self.name):
                fs, path = filesystem(self.name)
                return cast("BinaryIO", fs.open(path, "rb", **streamed))
        with read_errors(self.name):
            # Unbuffered: of a pipe whatever is there is taken, without waiting for more.
            return Path("/dev/stdin" if self.piped else self.name).open("rb", buffering=0)


def is_url(name: str) -> bool:
    return "://" in name


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for ``url`` and the path there."""
    with needs_extra("remote"), remote_errors(url):
        from fsspec.core import url_to_fs  # noqa: PLC0415 - an extra
    with remote_errors(url):
        found: tuple[Any, str] = url_to_fs(url)
    return found


def find_inputs(sources: Sequence[str], kind: Kind | None) -> list[Input]:
    """Return the files that ``sources`` name, globs expanded in the order of their names.

    ``kind`` is what they are where their names do not tell. Raises InputFileError.
    """
    found: list[Input] = []
    for source in sources:
        names = [source]
        if source == STANDARD_STREAM:
            if len(sources) > 1:
                raise InputFileError("standard input cannot be one of several inputs")
        elif is_url(source):
            names = _remote_names(source)
        elif not Path(source).exists() and glob.has_magic(source):
            names = sorted(name for name in glob.iglob(source, recursive=True) if Path(name).is_file())  # noqa: PTH207
        if not names:
            raise InputFileError(f"no file fits {source}")
        found += (_input(name, kind) for name in names)
    names_found = Counter(one.name for one in found)
    twice = sorted(name for name, count in names_found.items() if count > 1)
    if twice:
        raise InputFileError(f"named twice among the inputs: {', '.join(twice)}")
    return found


def _input(name: str, kind: Kind | None) -> Input:
    if name == STANDARD_STREAM:
        if kind is None:
            raise InputFileError("standard input has no name that tells its format: name it (--in-format)")
        return Input(name, kind)
    kind = kind or kind_of(name)
    if is_url(name):
        fs, path = filesystem(name)
        with remote_errors(name):
            info = fs.info(path)
        version = next((str(info[field]) for field in _VERSION_FIELDS if info.get(field)), None)
        return Input(name, kind, info.get("size"), version)
    with read_errors(name):
        stat = Path(name).stat()
    regular = Path(name).is_file()
    return Input(name, kind, stat.st_size if regular else None, str(stat.st_mtime_ns) if regular else None)


def _remote_names(url: str) -> list[str]:
    if not glob.has_magic(url.partition("?")[0]):
        return [url]
    fs, path = filesystem(url)
    with remote_errors(url):
        return [str(fs.unstrip_protocol(name)) for name in sorted(fs.glob(path))]


class Decompressor(Protocol):
    """What zlib and zstandard offer alike."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class ByteStream:
    """The uncompressed bytes of an input from ``offset`` on, in chunks; a context manager.

    ``taken`` is the number of bytes of the stored file that were read so far.
    """

    def __init__(self, source: Input, offset: int = 0) -> None:
        self.taken = 0
        self._source = source
        self._offset = offset
        self._file = source.open(forward=True)

    def __iter__(self) -> Iterator[bytes]:
        offset = self._offset
        if self._source.kind.compression is Compression.NONE:
            chunks = self._stored(CHUNK)
            if offset and not self._source.web and self._file.seekable():
                self._file.seek(offset)
                self.taken, offset = offset, 0
        else:
            chunks = self._unpacked(_decompressor(self._source))
        for chunk in chunks:
            if offset < len(chunk):
                yield chunk[offset:] if offset else chunk
            offset = max(offset - len(chunk), 0)

    def _stored(self, size: int) -> Iterator[bytes]:
        while True:
            with (remote_errors if is_url(self._source.name) else read_errors)(self._source.name):
                chunk = self._file.read(size)
            if not chunk:
                return
            self.taken += len(chunk)
            yield chunk

    def _unpacked(self, make: Callable[[], Decompressor]) -> Iterator[bytes]:
        unpacker: Decompressor | None = None
        for stored in self._stored(COMPRESSED_CHUNK):
            chunk = stored
            while chunk:
                if unpacker is None and not (chunk := chunk.lstrip(b"\0")):
                    break  # zeros may fill up the space behind a member
                unpacker = unpacker or make()
                try:
                    data = unpacker.decompress(chunk)
                except Exception as error:
                    # zlib.error, ZstdError: each library has its own.
                    raise InputFileError(f"{self._source.name} is damaged: {error}") from error
                if data:
                    yield data
                chunk = b""
                if unpacker.eof:
                    chunk, unpacker = unpacker.unused_data, None
        if unpacker is not None:
            raise InputFileError(f"{self._source.name} is damaged: it ends in the middle of its data")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _decompressor(source: Input) -> Callable[[], Decompressor]:
    if source.kind.compression is Compression.GZIP:
        return lambda: zlib.decompressobj(31)  # 31: with the header of gzip
    with needs_extra("bulk"):
        import zstandard  # noqa: PLC0415 - an extra
    unpacker = zstandard.ZstdDecompressor(max_window_size=MOST_ZSTD_WINDOW)
    return lambda: cast("Decompressor", unpacker.decompressobj())


@contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Turn an OSError in the block into InputFileError."""
    try:
        yield
    except OSError as error:
        raise InputFileError(f"{name} cannot be read: {error.strerror or error}") from error


@contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Turn whatever a remote file system's library raises into InputFileError."""
    try:
        yield
    except InputFileError:
        raise
    except ModuleNotFoundError:
        raise
    except ImportError as error:  # fsspec names the package that the protocol needs
        raise InputFileError(f"{url}: {error}") from error
    except Exception as error:
        # Each protocol has its own errors.
        raise InputFileError(f"{url} cannot be used: {str(error) or type(error).__name__}") from error


def same_file(one: str, other: Path) -> bool:
    """Say whether the input ``one`` is the file ``other``."""
    return not is_url(one) and Path(one).exists() and other.exists() and other.samefile(one)
