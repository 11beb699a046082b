"""One row of an input, and the place in the inputs behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gristmill.errors import InvalidRequestError
from gristmill.wire import json_type

_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Place:
    """Where to go on reading.

    ``file`` counts the inputs from 0; ``offset`` is in bytes of the uncompressed text (Parquet: in rows),
    ``lines`` the number of lines before it.
    """

    file: int = 0
    offset: int = 0
    lines: int = 0


BEGINNING: Final = Place()


@dataclass(frozen=True, slots=True)
class Row:
    """One row of an input.

    ``values`` is None where nothing of the row could be read; ``raw`` is a JSONL row's text, stripped.
    ``line`` counts from 1 within its file; ``end`` is the place behind the row; ``size`` its bytes there.
    ``batch`` and ``index`` say where a Parquet row stands in an Arrow record batch.
    """

    values: dict[str, Any] | None
    line: int
    end: Place = BEGINNING
    error: InvalidRequestError | None = None
    raw: bytes | None = None
    size: int = 0
    batch: Any = None
    index: int = 0

    def text(self, column: str) -> str:
        """Return the text in ``column``, or raise InvalidRequestError with the reason why there is none."""
        if self.error is not None:
            raise self.error
        value = (self.values or {}).get(column, _MISSING)
        if not isinstance(value, str):
            problem = "is missing" if value is _MISSING else f"is {json_type(value)}, it has to be a string"
            raise InvalidRequestError(f"line {self.line}: {column!r} {problem}")
        return value
