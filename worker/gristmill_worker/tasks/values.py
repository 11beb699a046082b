"""Arrays as JSON values, and back."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import numpy as np

from gristmill.errors import ErrorCode
from gristmill.wire import json_type
from gristmill_worker.engines.base import Array
from gristmill_worker.tasks.base import ItemError

ENCODINGS: Final = ("json", "base64")
DTYPES: Final = ("float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64", "bool")


def to_value(array: Array, encoding: str) -> Any:
    """Return ``array`` for a result: nested lists, or base64 of its little-endian bytes in row order."""
    if encoding == "json":
        return np.ascontiguousarray(array)  # the codec writes it as lists
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode("ascii")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def from_value(value: Any, name: str, dtype: str) -> Array:
    """Return the array that a request gives for the input ``name``; raise :class:`ItemError`."""
    if not isinstance(value, dict | list | int | float):
        raise ItemError(
            f"tensor {name!r} is {json_type(value)}, it has to be a list or an object with base64"
        )
    try:
        array = _from_base64(value, name) if isinstance(value, dict) else np.array(value)
        return array.astype(dtype, casting="same_kind" if array.size else "unsafe")
    except (ValueError, TypeError, OverflowError) as error:
        raise ItemError(f"tensor {name!r} cannot be read as {dtype}: {error}") from error


def check_finite(row: Array) -> None:
    """Raise :class:`ItemError` if the model answered NaN or infinity."""
    if row.dtype.kind == "f" and not np.isfinite(row).all():
        raise ItemError("the model answered NaN or infinity", ErrorCode.INVALID_OUTPUT)


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
