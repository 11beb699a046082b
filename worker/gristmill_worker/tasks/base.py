"""The task protocol and what tasks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from gristmill.errors import ErrorCode, GristmillError
from gristmill.wire import json_type
from gristmill_worker.engines.base import Array, Shape
from gristmill_worker.models.manifest import Manifest


class ItemError(GristmillError):
    """One request cannot be encoded or its output not decoded; neighbours are unaffected."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(slots=True, eq=False)
class Encoded:
    """One request, ready to be put in a batch.

    ``length`` is its size along the sequence dimension (tokens); ``arrays`` its inputs without the batch
    dimension, by name; ``options`` the request's own, validated.
    """

    length: int
    arrays: Mapping[str, Any]  # (length, ...) each
    options: Mapping[str, Any]
    truncated: bool = False


class Task(Protocol):
    """Encodes and decodes for one model."""

    def encode(self, bodies: Sequence[Mapping[str, Any]]) -> list[Encoded | ItemError]:
        """Encode a window of request bodies; a bad one gives its error in its place."""
        ...

    def assemble(self, items: Sequence[Encoded], shape: Shape) -> dict[str, Array]:
        """Pad ``items`` to one batch of exactly ``shape``; rows past the last item are padding."""
        ...

    def decode(self, outputs: Mapping[str, Array], items: Sequence[Encoded]) -> list[Any]:
        """Return one JSON value, or ItemError, per item."""
        ...


class MakeTask(Protocol):
    def __call__(self, model_dir: Path, manifest: Manifest, *, truncate: bool) -> Task: ...


def read_options(body: Mapping[str, Any], checks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body's ``options`` after ``checks[name](value)``; raise :class:`ItemError` on others."""
    options = body.get("options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise ItemError(f"'options' is {json_type(options)}, it has to be an object")
    for name, value in options.items():
        if name not in checks:
            known = ", ".join(sorted(checks))
            raise ItemError(f"option {name[:40]!r} is unknown for this model: use {known}")
        if not checks[name](value):
            raise ItemError(f"option {name!r} has a value that it does not take")
    return options


TASKS: Mapping[str, str] = {
    "embeddings": "gristmill_worker.tasks.embeddings",
    "text-classification": "gristmill_worker.tasks.text_classification",
    "tensors": "gristmill_worker.tasks.tensors",
}


def make_task(model_dir: Path, manifest: Manifest, *, truncate: bool) -> Task:
    """Return the task that the manifest names."""
    make: MakeTask = import_module(TASKS[manifest.task]).make
    return make(model_dir, manifest, truncate=truncate)
