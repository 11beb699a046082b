"""The worker's settings: YAML, environment and flags in one frozen record, by one rule of precedence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from gristmill import urls
from gristmill.errors import InputFileError
from gristmill.wire import MAX_BODY_BYTES, MAX_TTL_S
from gristmill_worker.batching.shapes import MAX_TOKENS
from gristmill_worker.cpus import parse_cpu_list
from gristmill_worker.engines.base import MEMORY_MB
from gristmill_worker.engines.choice import Wanted
from gristmill_worker.models.manifest import describe
from gristmill_worker.topology.bind import MemoryPolicy
from gristmill_worker.topology.plan import AUTO, Auto

ENV_PREFIX: Final = "GRISTMILL_"
LOCAL: Final = "127.0.0.1"
RQ_RESULT_TTL_S: Final = 500  # RQ's own default


def _read_cpu_list(value: Any) -> Any:
    return parse_cpu_list(value) if isinstance(value, str) else value


CpuList = Annotated[tuple[Annotated[int, Field(ge=0, lt=65_536)], ...], BeforeValidator(_read_cpu_list)]


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port", "[v6]:port" or a port alone, which is of this machine only.

    Raises ValueError.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ValueError(f"{text!r} is no address to listen at: use HOST:PORT, or a PORT of {LOCAL}")
    return host.strip("[]") or LOCAL, int(port)


def _read_address(value: Any) -> Any:
    host, port = parse_address(str(value))
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _without_nul(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("no path has a NUL character")
    return path


AnyPath = Annotated[Path, AfterValidator(_without_nul)]
Address = Annotated[str, BeforeValidator(_read_address)]
Size = Annotated[int, Field(ge=1)]


class BatchSettings(BaseModel):
    """How requests become batches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_items: int = Field(256, ge=1, le=4096)  # N: requests in one window
    max_bytes: int = Field(256 * MAX_BODY_BYTES, ge=1)  # of bodies in one window
    max_wait_ms: float = Field(5.0, ge=0, le=60_000)  # T: from the arrival of the oldest
    max_tokens: int = Field(MAX_TOKENS, ge=1)  # of a batch, padding included; bounds the default shapes
    shapes: tuple[tuple[Size, Size], ...] | None = Field(None, min_length=1)  # (batch, sequence)


class RetrySettings(BaseModel):
    """How often a request is tried whose error may pass, and how long it waits in between."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_attempts: int = Field(3, ge=1, le=100)  # with the first; max_deliveries bounds them as well
    backoff_s: float = Field(1.0, gt=0, le=3600)  # after the first; doubled after each further one
    max_backoff_s: float = Field(30.0, gt=0, le=3600)


ONCE: Final = RetrySettings(max_attempts=1)


class RqSettings(BaseModel):
    """Of a queue of RQ jobs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow_pickle: bool = False  # whoever can enqueue then runs code in the worker
    with_scheduler: bool = False  # bring back scheduled jobs, as 'rq worker --with-scheduler'
    path: AnyPath = Path()  # the folder that the jobs' callbacks are imported from


class Settings(BaseModel):
    """One model on one queue: the workers of one machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Literal["streams", "rq"] = "streams"  # what the queue is: this project's own, or of RQ jobs
    queue: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    model: AnyPath
    redis: str = "redis://localhost:6379/0"
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,64}$")  # default: host, pid and random digits
    # auto: what suits this CPU; null computes nothing: to measure the rest
    engine: Literal["auto", "openvino", "onnxruntime", "deepsparse", "null"] = "auto"
    form: str = "auto"  # of the model: "fp32", or what 'model quantize' made
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of what is computed in floats
    engine_memory_mb: int = Field(MEMORY_MB, ge=0)  # for compilations of single shapes
    cache_dir: AnyPath | None = None  # for what an engine loads faster the next time
    threads: int = Field(1, ge=1)
    cores: CpuList | None = None  # CPUs to run on; default: those that the process was given
    memory_policy: MemoryPolicy = "preferred"  # of the NUMA node of ``cores``
    batch: BatchSettings = BatchSettings()
    truncate: bool = True  # cut long texts; a request's own option goes first
    result_cache_mb: float = Field(
        0.0, ge=0, le=1_048_576
    )  # for answers to requests that come again; 0: none
    lease_s: float = Field(30.0, ge=1, le=86_400)
    result_ttl_s: int = Field(3600, ge=1, le=MAX_TTL_S)  # of RQ jobs: 500
    batch_timeout_s: float = Field(300.0, ge=0, le=86_400)  # after it the process is ended; 0: never
    max_deliveries: int = Field(5, ge=1)
    retry: RetrySettings = RetrySettings()
    rq: RqSettings = RqSettings()
    max_body_bytes: int = Field(MAX_BODY_BYTES, ge=1)
    metrics: Address | None = None  # off: no port is opened unasked
    # What follows is for 'gristmill-worker run', which starts a process for each core set.
    workers: Annotated[int, Field(ge=1)] | Auto = AUTO  # auto: as many as there are cores for
    cores_per_worker: Annotated[int, Field(ge=1)] | Auto = AUTO  # auto: one, or as many as there are threads
    spares: int = Field(0, ge=0, le=16)  # processes that are warm and wait until another one ends
    lazy: bool = False  # load the model when its queue has requests
    idle_s: float = Field(300.0, ge=0)  # lazy: without a request, until it is unloaded
    max_rss_mb: float | None = Field(None, gt=0)  # a worker that grows above it is replaced
    shutdown_s: float = Field(60.0, gt=0, le=86_400)  # to finish what was taken; then a process is ended
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="before")
    @classmethod
    def _as_rq_has_it(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("source") == "rq":
            return {"result_ttl_s": RQ_RESULT_TTL_S, **data}
        return data

    @property
    def attempts(self) -> RetrySettings:
        """How often the worker itself tries: RQ jobs say it on their own, and RQ sees to it."""
        return ONCE if self.source == "rq" else self.retry

    @property
    def cores_for_one(self) -> int | Auto:
        """How many cores each worker is to have."""
        return self.threads if self.cores_per_worker == AUTO and self.threads > 1 else self.cores_per_worker

    @property
    def wanted(self) -> Wanted:
        """What to choose a variant of the model by."""
        return Wanted(self.engine, self.form, self.precision)


def load_settings(path: Path | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Merge, the first going first: ``flags`` that are not None, GRISTMILL_* variables, the file, defaults.

    A nested field's variable joins the names with two underscores: GRISTMILL_BATCH__MAX_ITEMS. Lists are
    written as in YAML, an empty variable counts as none.

    Raises InputFileError, and InvalidRequestError for a Redis URL that is none.
    """
    merged = _read_file(path) if path is not None else {}
    for over in (_from_env(env), flags):
        for name, value in over.items():
            if isinstance(value, Mapping):
                below = merged.get(name)
                if given := {inner: each for inner, each in value.items() if each is not None}:
                    merged[name] = {**(below if isinstance(below, dict) else {}), **given}
            elif value is not None:
                merged[name] = value
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        missing = any(problem["type"] == "missing" for problem in error.errors())
        hint = ". Give a configuration file, or --queue and --model" if missing and path is None else ""
        raise InputFileError(f"the settings cannot be used: {describe(error)}{hint}") from error
    servers = urls.parse(settings.redis)  # only looked at
    if settings.source == "rq" and servers is not None:
        raise InputFileError(
            f"redis: RQ jobs are served from one server (redis://, rediss:// or unix://), not through "
            f"sentinels or from a cluster as {urls.hidden(settings.redis)!r} names them"
        )
    if settings.source != "rq" and settings.rq != RqSettings():
        raise InputFileError(
            f"rq: these settings are for queues of RQ jobs, and the source of {settings.queue!r} is "
            f"{settings.source!r}: say 'source: rq' as well, or leave them out"
        )
    return settings


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: an impossible date
        raise InputFileError(f"the configuration {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise InputFileError(f"the configuration {path} has to be a mapping of settings")
    return data


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in sorted(env.items()):
        name = variable.removeprefix(ENV_PREFIX).lower()
        outer, _, inner = name.partition("__")
        # Other programs of this project have variables of their own: take only what is a setting.
        if variable == name or outer not in Settings.model_fields or not text:
            continue
        value: Any = text  # the model turns it into a number or a truth value where one is wanted
        if text[0] in "[{":
            try:
                value = yaml.safe_load(text)
            except (ValueError, RecursionError, yaml.YAMLError) as error:
                raise InputFileError(f"the variable {variable} cannot be read: {error}") from error
        if inner:
            if not isinstance(found.setdefault(outer, {}), dict):
                raise InputFileError(f"{ENV_PREFIX}{outer.upper()} and {variable} exclude each other")
            found[outer][inner] = value
        else:
            found[outer] = value
    return found
