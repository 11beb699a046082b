"""The table of measured costs beside a model: one file for each CPU model, engine, precision and threads."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gristmill.errors import InputFileError
from gristmill_worker.engines.base import Shape

CPU_INFO: Final = Path("/proc/cpuinfo")
# What decides which kernels an engine uses; a hypervisor may hide some on the same CPU model.
_FEATURES: Final = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_FEATURES_ARM: Final = ("asimd", "asimddp", "sve", "i8mm", "bf16")
_ARM_NAME: Final = ("CPU implementer", "CPU part")

Size = Annotated[int, Field(ge=1, le=2**20)]


class CostKey(BaseModel):
    """What the costs were measured with; any difference makes them someone else's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str
    engine: str
    engine_version: str
    precision: str
    threads: int = Field(ge=1)
    model: str  # the manifest's digest

    @property
    def file_name(self) -> str:
        """``costs-<digest of the key>.json``."""
        content = orjson.dumps(self.model_dump(), option=orjson.OPT_SORT_KEYS)
        return f"costs-{hashlib.sha256(content).hexdigest()[:12]}.json"


class Measurement(BaseModel):
    """The median of ``runs`` timed runs of one shape, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: tuple[Size, Size]  # (batch, sequence)
    seconds: float = Field(ge=1e-7, le=1e5)
    runs: int = Field(ge=1)


class CostTable(BaseModel):
    """Measured costs. What is between them is fitted when it is asked for, and never stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    key: CostKey
    measurements: tuple[Measurement, ...] = Field(min_length=1)
    shapes: tuple[tuple[Size, Size], ...] = ()  # chosen for the texts that the model was tuned with

    @property
    def measured(self) -> dict[Shape, float]:
        """Seconds of one batch by (batch, sequence)."""
        return {entry.shape: entry.seconds for entry in self.measurements}


def cost_key(engine: str, precision: str, threads: int, model_digest: str) -> CostKey:
    """Return the key for ``engine`` on this CPU."""
    return CostKey(
        cpu=cpu_model(),
        engine=engine,
        engine_version=_version(engine),
        precision=precision,
        threads=threads,
        model=model_digest,
    )


def load_costs(model_dir: Path, key: CostKey) -> CostTable | None:
    """Return the table that was stored for ``key``; None if there is none that can be used."""
    try:
        table = CostTable.model_validate_json((model_dir / key.file_name).read_bytes())
    except (OSError, ValidationError):
        return None
    return table if table.key == key else None


def save_costs(model_dir: Path, table: CostTable) -> Path:
    """Store ``table`` in the model directory, replacing the one of the same key; return its path.

    Raises :class:`InputFileError` where the directory cannot be written.
    """
    path = model_dir / table.key.file_name
    data = orjson.dumps(table.model_dump(), option=orjson.OPT_INDENT_2) + b"\n"
    try:
        with tempfile.NamedTemporaryFile(dir=model_dir, prefix=".costs-", delete=False) as file:
            file.write(data)
        part = Path(file.name)
        part.chmod(0o644)
        part.replace(path)
    except OSError as error:
        raise _not_writable(model_dir, error) from error
    return path


def check_writable(model_dir: Path) -> None:
    """Raise :class:`InputFileError` if no table can be stored: better before measuring than after."""
    try:
        with tempfile.TemporaryFile(dir=model_dir):
            pass
    except OSError as error:
        raise _not_writable(model_dir, error) from error


def cpu_model() -> str:
    """Return this CPU's model and the features that engines choose their kernels by."""
    try:
        return describe_cpu(CPU_INFO.read_text("utf-8", "replace"))
    except OSError:
        return platform.processor() or platform.machine()


def describe_cpu(cpuinfo: str) -> str:
    """Return the model and features of the first CPU in the text of ``/proc/cpuinfo``."""
    fields: dict[str, str] = {}
    for line in cpuinfo.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    numbers = [fields[name] for name in ("cpu family", "model", "stepping") if name in fields]
    name = fields.get("model name") or " ".join(fields[part] for part in _ARM_NAME if part in fields)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    features = [flag for flag in (*_FEATURES, *_FEATURES_ARM) if flag in flags]
    return " ".join([name or platform.machine(), *(["/".join(numbers)] if numbers else []), *features])


def _version(engine: str) -> str:
    try:
        return metadata.version(engine)  # every engine is called as its distribution
    except metadata.PackageNotFoundError:
        return "unknown"


def _not_writable(model_dir: Path, error: OSError) -> InputFileError:
    return InputFileError(
        f"the measured costs cannot be stored in {model_dir} ({os.strerror(error.errno or 0)}): "
        "tune a copy of the model in a directory that can be written, and serve that copy"
    )
