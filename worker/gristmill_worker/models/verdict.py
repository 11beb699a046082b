"""What ``model check`` found of one variant on one CPU, stored beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from gristmill_worker.models.records import RunKey, load_record, save_record

_PREFIX = "check"


class Verdict(BaseModel):
    """Whether a variant answers as the reference does, and the shapes that were tried for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    key: RunKey
    passed: bool
    problems: tuple[str, ...]  # limits that were broken
    shapes: tuple[tuple[int, int], ...]  # (batch, sequence) that agreed with the reference
    shared_shapes: tuple[tuple[int, int], ...] = ()  # the same, of one compilation for all of them
    threads: int | None = None  # that they ran with
    figures: dict[str, float]  # what was measured, by name
    limits: dict[str, float] = {}  # that it was judged by


def load_verdict(model_dir: Path, key: RunKey) -> Verdict | None:
    """Return what was found for ``key``; None if nothing was."""
    verdict = load_record(_path(model_dir, key), Verdict)
    return verdict if verdict is not None and verdict.key == key else None


def save_verdict(model_dir: Path, verdict: Verdict) -> Path:
    """Store ``verdict``, replacing the one of the same key; return its path. Raises InputFileError."""
    path = _path(model_dir, verdict.key)
    save_record(path, verdict)
    return path


def verdicts_elsewhere(model_dir: Path, key: RunKey) -> Iterator[Verdict]:
    """Yield what was found for the same form, engine and precision on whatever CPU, with any version."""
    for path in sorted(model_dir.glob(f"{_PREFIX}-*.json")):
        found = load_record(path, Verdict)
        if found is not None and _what(found.key) == _what(key):
            yield found


def _what(key: RunKey) -> tuple[str, str, str]:
    return key.engine, key.precision, key.model


def _path(model_dir: Path, key: RunKey) -> Path:
    return model_dir / key.file_name(_PREFIX)
