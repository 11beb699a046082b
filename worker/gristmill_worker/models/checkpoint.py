"""Reading a Hugging Face checkpoint folder: the configuration and the safetensors weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import safetensors
from numpy.typing import NDArray

from gristmill.errors import InputFileError
from gristmill_worker.models.manifest import ModelRefusedError

Weight = NDArray[np.float32]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_BASE_PREFIX = re.compile(r"^(?:bert|roberta|distilbert)\.")
# TensorFlow's names of the two LayerNorm parameters, as checkpoints converted from it still carry them.
_OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


@dataclass(frozen=True)
class Checkpoint:
    """A configuration and its weights by name, without the base model's prefix (``bert.``, ``roberta.``)."""

    config: Mapping[str, Any]
    weights: Mapping[str, Weight]

    def any_weight(self, name: str) -> Weight:
        """Return one weight of whatever shape; raise :class:`ModelRefusedError` if it is missing."""
        try:
            return self.weights[name]
        except KeyError:
            raise ModelRefusedError(
                f"the checkpoint has no weight {name!r}: it is incomplete, or not of the family that its "
                f"config.json names ({self.config.get('model_type')!r})"
            ) from None

    def weight(self, name: str, *shape: int) -> Weight:
        """Return one weight; raise :class:`ModelRefusedError` if it is missing or not of ``shape``."""
        array = self.any_weight(name)
        if array.shape != shape:
            raise ModelRefusedError(f"weight {name!r} has the shape {array.shape}, config.json says {shape}")
        return array


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; raise :class:`InputFileError` if there is none."""
    try:
        data = orjson.loads(path.read_bytes())
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise InputFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputFileError(f"{path} has to hold a JSON object")
    return data


def has_weights(folder: Path) -> bool:
    """Say whether ``folder`` holds safetensors weights under their standard names."""
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read ``config.json`` and every weight as float32, from one file or from shards.

    Raises :class:`InputFileError` for files that cannot be read, :class:`ModelRefusedError` for weights that
    are no floating-point numbers.
    """
    config = read_json(folder / "config.json")
    weights: dict[str, Weight] = {}
    for name in _weight_files(folder):
        for key, record in _read_tensors(folder / name):
            if (array := _as_float32(record)) is not None:
                weights[_plain_name(key)] = array
    return Checkpoint(config, weights)


def _weight_files(folder: Path) -> list[str]:
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    shards = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(shards, dict) or not all(_is_file_name(name) for name in shards.values()):
        raise InputFileError(f"{folder / INDEX_FILE} has no 'weight_map' from weights to file names")
    return sorted(set(shards.values()))


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _read_tensors(path: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        return list(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror}") from error
    except safetensors.SafetensorError as error:
        raise InputFileError(f"{path} is not a valid safetensors file: {error}") from error


def _as_float32(record: Mapping[str, Any]) -> Weight | None:
    """Return the tensor as float32, or None for integers: buffers such as ``position_ids``."""
    kind, shape = record["dtype"], record["shape"]
    if kind == "BF16":
        # A bfloat16 is the upper half of the float32 of the same value.
        halves = np.frombuffer(record["data"], "<u2").astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(shape)
    if kind in _FLOATS:
        return np.frombuffer(record["data"], _FLOATS[kind]).astype(np.float32).reshape(shape)
    return None


def _plain_name(key: str) -> str:
    name = _BASE_PREFIX.sub("", key)
    for old, new in _OLD_NAMES:
        name = name.replace(old, new)
    return name
