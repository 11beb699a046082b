"""``gristmill.json``: what a model directory holds, and the digests that guard it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gristmill.errors import InputFileError

FILE_NAME = "gristmill.json"
MODEL_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"

DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64", "bool")

Dim = int | Literal["batch", "sequence"]
Task = Literal["embeddings", "text-classification", "tensors"]
FormName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


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


class Form(BaseModel):
    """The same model in another file: its weights quantized or pruned for some engines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    precision: str
    sparsity: float = Field(0.0, ge=0.0, le=1.0)
    engines: tuple[str, ...] = Field(min_length=1)  # that it was made for
    method: str  # how it was made, for people
    files: dict[str, str]  # of this form alone: file name -> sha256, hex

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.file not in self.files:
            raise ValueError(f"'files' has no digest of {self.file!r}")
        return self


class Manifest(BaseModel):
    """The manifest of a model directory.

    What it says at the top is the reference: the form that was imported, called by its ``precision``.
    ``forms`` are made from it, with the same inputs and outputs; :meth:`select` gives one of all of them.
    """

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
    forms: dict[FormName, Form] = {}
    # what load() finds: forms whose files are missing or were changed, and how; no part of the file
    damaged: dict[FormName, str] = Field(default_factory=dict, exclude=True)
    # what select() leaves
    engines: tuple[str, ...] = ()  # that the form was made for; () is any

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
        if bad := [name for name in self.all_files if os.path.basename(name) != name or "\0" in name]:  # noqa: PTH119
            raise ValueError(f"'files' names something outside the directory: {bad[0]!r}")
        for name, form in self.forms.items():
            if twice := [file for file, sha in form.files.items() if self.all_files[file] != sha]:
                raise ValueError(f"form {name!r} and another have a file {twice[0]!r} of different content")
            if taken := sorted(form.files.keys() & self.files.keys()):
                raise ValueError(f"form {name!r} has the reference's file {taken[0]!r}")
        if self.precision in self.forms:
            raise ValueError(f"form {self.precision!r} has the name of the reference")
        return self

    @property
    def all_files(self) -> dict[str, str]:
        """Every file of the directory with its sha256, those of the forms too."""
        files = dict(self.files)
        for form in self.forms.values():
            files |= form.files
        return files

    @property
    def usable_forms(self) -> tuple[str, ...]:
        """The forms whose files are as they were made, the reference first."""
        return tuple(name for name in self.form_names if name not in self.damaged)

    @property
    def form_names(self) -> tuple[str, ...]:
        """The forms, the reference first."""
        return (self.precision, *self.forms)

    def select(self, name: str) -> Manifest:
        """Return the manifest of one form alone, which keeps its digest whatever else is added.

        Raises :class:`ModelRefusedError` for a form that is not there, or is damaged.
        """
        if name in self.damaged:
            raise ModelRefusedError(
                f"form {name!r} cannot be used: {self.damaged[name]}. Restore the file, or make the form "
                f"again with 'gristmill-worker model quantize … --name {name} --force'"
            )
        if name == self.precision:
            return self.model_copy(update={"forms": {}, "damaged": {}})
        try:
            form = self.forms[name]
        except KeyError:
            raise ModelRefusedError(
                f"{self.name} has no form {name!r}, but {', '.join(self.form_names)}: "
                "'gristmill-worker model quantize' makes others"
            ) from None
        fields = {name: getattr(form, name) for name in ("file", "precision", "sparsity", "engines")}
        return self.model_copy(
            update={**fields, "files": {**self.files, **form.files}, "forms": {}, "damaged": {}}
        )

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
    """Read the manifest and verify every file; raise :class:`ModelRefusedError` on any difference.

    A form whose files differ does not keep the others from being used: it is among ``damaged``.
    """
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
    if changed := _changed(directory, found, manifest.files):
        raise ModelRefusedError(f"{changed}. Restore the file or import the model again.")
    damaged = {name: damage for name, form in manifest.forms.items() if (damage := _damage(directory, form))}
    return manifest.model_copy(update={"damaged": damaged})


def _damage(directory: Path, form: Form) -> str | None:
    try:
        return _changed(directory, digest_files(directory, form.files), form.files)
    except OSError as error:
        return f"{error.filename} cannot be read: {os.strerror(error.errno or 0)}"


def _changed(directory: Path, found: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    for name, digest in expected.items():
        if found[name] != digest:
            return f"{directory / name} was changed: its sha256 is {found[name]}, the manifest says {digest}"
    return None
