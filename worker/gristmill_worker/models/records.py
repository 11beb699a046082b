"""What was measured of a model on one CPU with one engine, and is kept beside it for that case alone."""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Final, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from gristmill.errors import InputFileError

SELF_TEST: Final = "selftest"  # the prefix of records that workers write themselves

Record = TypeVar("Record", bound=BaseModel)


class RunKey(BaseModel):
    """What something was measured with; any difference makes it someone else's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str
    engine: str
    engine_version: str
    precision: str  # see Variant.precision
    model: str  # digest of the manifest of the one form that ran

    def file_name(self, prefix: str) -> str:
        """``<prefix>-<digest of the key>.json``."""
        content = orjson.dumps(self.model_dump(), option=orjson.OPT_SORT_KEYS)
        return f"{prefix}-{hashlib.sha256(content).hexdigest()[:12]}.json"


def load_record(path: Path, kind: type[Record]) -> Record | None:
    """Return the record in ``path``; None if there is none that can be used."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def save_record(path: Path, record: BaseModel) -> None:
    """Write ``record`` in one step; raise :class:`InputFileError` where the directory cannot be written."""
    data = orjson.dumps(record.model_dump(mode="json"), option=orjson.OPT_INDENT_2) + b"\n"
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            part = Path(file.name)
            try:
                file.write(data)
                file.flush()
                part.chmod(0o644)
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise _not_writable(path.parent, error) from error


def check_writable(model_dir: Path) -> None:
    """Raise :class:`InputFileError` if no record can be stored: better before measuring than after."""
    try:
        with tempfile.TemporaryFile(dir=model_dir):
            pass
    except OSError as error:
        raise _not_writable(model_dir, error) from error


def engine_version(engine: str) -> str:
    """Return the version of an engine's distribution; each is called as its engine."""
    try:
        return metadata.version(engine)
    except metadata.PackageNotFoundError:
        return "unknown"


def _not_writable(model_dir: Path, error: OSError) -> InputFileError:
    return InputFileError(
        f"what is measured cannot be stored in {model_dir} ({os.strerror(error.errno or 0)}): "
        "use a copy of the model in a directory that can be written, and serve that copy"
    )
