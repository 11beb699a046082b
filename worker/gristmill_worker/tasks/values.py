"""Arrays as JSON values, and back."""

from __future__ import annotations

import base64
import binascii
from functools import cache
from typing import Any, Final

import numpy as np

from gristmill.errors import ErrorCode
from gristmill.wire import json_type
from gristmill_worker.engines.base import Array
from gristmill_worker.models.manifest import DTYPES
from gristmill_worker.tasks.base import ItemError

ENCODINGS: Final = ("json", "base64")


def to_value(array: Array, encoding: str) -> Any:
    """Return ``array`` for a result: nested lists, or base64 of its little-endian bytes in row order."""
    array = np.asarray(array, order="C")
    if encoding == "json":
        return array if array.ndim else array.item()  # the codec writes arrays as lists
    name, little = _little(array.dtype)
    data = base64.b64encode(array.astype(little, copy=False).tobytes()).decode("ascii")
    return {"dtype": name, "shape": list(array.shape), "data": data}


@cache
def _little(dtype: np.dtype[Any]) -> tuple[str, np.dtype[Any]]:
    """Return the dtype's name, which numpy takes longer to make than base64, and its little-endian form."""
    return dtype.name, dtype.newbyteorder("<")


def from_value(value: Any, name: str, dtype: str) -> Array:
    """Return the array that a request gives for the input ``name``; raise :class:`ItemError`."""
    if isinstance(value, dict):
        return _cast(_from_base64(value, name), name, dtype)
    if not isinstance(value, list | int | float):
        raise ItemError(
            f"tensor {name!r} is {json_type(value)}, it has to be a list or an object with base64"
        )
    _check_numbers(value, name)  # first: numpy makes room for as many characters as the longest string has
    try:
        return _cast(np.array(value), name, dtype)
    except ValueError as error:
        raise ItemError(f"tensor {name!r} is no array: {error}") from error


def _check_numbers(value: Any, name: str) -> None:
    for entry in value if isinstance(value, list) else (value,):
        if isinstance(entry, list):
            _check_numbers(entry, name)
        elif not isinstance(entry, int | float):
            raise ItemError(f"tensor {name!r} holds {json_type(entry)}, it has to hold numbers only")


def _cast(array: Array, name: str, dtype: str) -> Array:
    """Return ``array`` as ``dtype`` if every value keeps its meaning; raise :class:`ItemError` otherwise."""
    target = np.dtype(dtype)
    if array.size == 0:
        return array.astype(target)
    kinds = {"b": "b", "i": "biu", "u": "biu"}.get(target.kind, "biuf")
    fits = array.dtype.kind in kinds
    if fits and target.kind in "iu":
        limits = np.iinfo(target)
        fits = bool(int(array.min()) >= limits.min and int(array.max()) <= limits.max)
    with np.errstate(over="ignore"):
        cast = array.astype(target) if fits else array
    if not fits or (target.kind == "f" and np.isinf(cast).any() and not np.isinf(array).any()):
        raise ItemError(f"tensor {name!r} holds values that {dtype} cannot hold")
    return cast


def finite_rows(array: Array) -> list[bool]:
    """Say for each row whether it holds neither NaN nor infinity."""
    finite: Array = np.asarray(np.isfinite(array).reshape(len(array), -1).all(axis=1))  # (rows,)
    rows: list[bool] = finite.tolist()
    return rows


def invalid_output() -> ItemError:
    """Return the error of an item for which the model answered NaN or infinity."""
    return ItemError("the model answered NaN or infinity", ErrorCode.INVALID_OUTPUT)


def _from_base64(value: dict[str, Any], name: str) -> Array:
    dtype, shape, data = value.get("dtype"), value.get("shape"), value.get("data")
    if dtype not in DTYPES:
        raise ItemError(f"tensor {name!r} has no known dtype: use one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ItemError(f"tensor {name!r}: 'shape' has to be a list of sizes")
    if not isinstance(data, str):
        raise ItemError(f"tensor {name!r}: 'data' has to be a base64 string")
    try:
        raw = base64.b64decode(data, validate=True)
        return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    except (ValueError, binascii.Error) as error:
        raise ItemError(f"tensor {name!r} does not fit its dtype and shape: {error}") from error
