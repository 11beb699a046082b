"""``gristmill.json``: what a model directory holds, and the digests that guard it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gristmill.errors import InputFileError

FILE_NAME = "gristmill.json"
MODEL_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"

DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64", "bool")

Dim = int | Literal["batch", "sequence"]
Task = Literal["embeddings", "text-classification", "tensors"]


class ModelRefusedError(InputFileError):
    """A model directory is incomplete, does not fit its manifest, or was changed."""


class Tensor(BaseModel):
    """One input or output of the graph; ``shape`` is e.g. ``["batch", "sequence", 384]``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: str  # numpy's name: "int64", "float32"
    shape: tuple[Dim, ...]

    @model_validator(mode="after")
    def _valid(self) -> Self:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name!r} is of {self.dtype}: models of {', '.join(DTYPES)} can be served")
        if not self.shape or self.shape[0] != "batch":
            raise ValueError(f"the first dimension of {self.name!r} has to be 'batch'")
        return self


class Manifest(BaseModel):
    """The manifest of a model directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    name: str
    task: Task
    file: str = MODEL_FILE
    precision: str = "fp32"
    sparsity: float = Field(0.0, ge=0.0, le=1.0)  # share of zero weights in the matrix multiplications
    inputs: tuple[Tensor, ...] = Field(min_length=1)
    outputs: tuple[Tensor, ...] = Field(min_length=1)
    max_length: int = Field(gt=0)  # tokens, special tokens included
    pad_token_id: int = Field(0, ge=0, lt=2**31)
    # embeddings
    pooling: Literal["mean", "cls", "max"] | None = None
    normalize: bool = False
    # text-classification
    labels: tuple[str, ...] | None = None
    activation: Literal["softmax", "sigmoid"] | None = None
    # origin
    source: str
    licence: str
    files: dict[str, str]  # file name -> sha256, hex

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.task == "embeddings" and self.pooling is None:
            raise ValueError("task embeddings needs 'pooling'")
        if self.task == "text-classification" and (not self.labels or self.activation is None):
            raise ValueError("task text-classification needs 'labels' and 'activation'")
        if self.file not in self.files:
            raise ValueError(f"'files' has no digest of {self.file!r}")
        if self.task != "tensors" and TOKENIZER_FILE not in self.files:
            raise ValueError(f"'files' has no digest of {TOKENIZER_FILE!r}")
        if bad := [name for name in self.files if os.path.basename(name) != name or "\0" in name]:  # noqa: PTH119
            raise ValueError(f"'files' names something outside the directory: {bad[0]!r}")
        return self

    @property
    def digest(self) -> str:
        """sha256 over the manifest, and through its digests over every file.

        Fields with their default values do not count, so that fields added later change no digest.
        """
        content = self.model_dump(exclude_defaults=True)
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()

    @property
    def id(self) -> str:
        """The model's name and digest as results show it."""
        return f"{self.name}@{self.digest[:12]}"

    def write(self, directory: Path) -> None:
        """Write ``gristmill.json``; the last step of making a model directory."""
        data = {**self.model_dump(exclude_none=True), "digest": self.digest}
        (directory / FILE_NAME).write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")


def describe(error: ValidationError) -> str:
    """Return what is wrong in one line."""
    return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())


def digest_files(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of each named file."""
    digests = {}
    for name in names:
        with (directory / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def load(directory: Path) -> Manifest:
    """Read the manifest and verify every file; raise :class:`ModelRefusedError` on any difference."""
    path = directory / FILE_NAME
    try:
        data = orjson.loads(path.read_bytes())
        digest = data.pop("digest", None) if isinstance(data, dict) else None
        manifest = Manifest.model_validate(data)
        found = digest_files(directory, manifest.files)
    except FileNotFoundError as error:
        raise ModelRefusedError(
            f"{error.filename} is missing: make the directory with 'gristmill-worker model import'"
        ) from error
    except OSError as error:
        raise ModelRefusedError(f"{directory} cannot be read: {error}") from error
    except orjson.JSONDecodeError as error:
        raise ModelRefusedError(f"{path} is not valid JSON: {error}") from error
    except ValidationError as error:
        raise ModelRefusedError(f"{path} is not a valid manifest: {describe(error)}") from error
    if digest != manifest.digest:
        raise ModelRefusedError(f"{path} was changed: restore it or import the model again")
    for name, expected in manifest.files.items():
        if found[name] != expected:
            raise ModelRefusedError(
                f"{directory / name} was changed: its sha256 is {found[name]}, the manifest says {expected}. "
                "Restore the file or import the model again."
            )
    return manifest
