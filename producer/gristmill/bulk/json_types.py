"""The types of a table's columns whose rows come as JSON: found in the first rows, kept by the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from gristmill.bulk.rows import Row
from gristmill.errors import InvalidRequestError
from gristmill.wire import json_type

SAMPLE_ROWS: Final = 1000
INTEGERS: Final = range(-(2**63), 2**63)


def find_types(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return "integer", "number" or "truth" for each column that holds nothing else; others become text."""
    found: dict[str, str | None] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                kind = _kind(value)
                known = found.setdefault(name, kind)
                if known != kind:
                    numbers = {known, kind} == {"integer", "number"}
                    found[name] = "number" if numbers else None
    return {name: kind for name, kind in found.items() if kind is not None}


def _kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int):
        return "integer" if value in INTEGERS else None
    return "number" if isinstance(value, float) else None


def fitted(row: Row, types: Mapping[str, str]) -> Row:
    """Return ``row``, or in its place one without the values that do not fit and with an error about them."""
    if row.values is None:
        return row
    problem = None
    values = dict(row.values)
    for name, kind in types.items():
        value = values.get(name)
        if value is None or _kind(value) == kind or (kind == "number" and _kind(value) == "integer"):
            continue
        values[name] = None
        problem = (
            problem or f"line {row.line}: {name!r} is {json_type(value)}, in the first rows it is a {kind}"
        )
    if problem is None:
        return row
    return replace(row, values=values, error=row.error or InvalidRequestError(problem))
