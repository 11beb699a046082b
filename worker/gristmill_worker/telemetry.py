"""Logs (structlog: JSON lines on stderr) and the counters of a worker."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Final

import structlog

STDERR: Final = 2


class _Stderr(StringIO):
    """A log that nobody reads any more, or whose disk is full, ends no work."""

    def write(self, text: str) -> int:
        say(text)
        return len(text)


def say(text: str) -> None:
    """Write to stderr at once, if that can be done; also from signal handlers."""
    rest = text.encode("utf-8", "backslashreplace")
    with suppress(OSError):
        while rest:
            rest = rest[os.write(STDERR, rest) :]


def configure_logging(level: str) -> None:
    """Write one JSON object per event to stderr, from ``level`` up."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(
                # No local variables: they hold what the requests say.
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=_Stderr()),
        cache_logger_on_first_use=True,
    )


def logger() -> Any:
    """Return the project's logger."""
    return structlog.get_logger("gristmill")


@dataclass(slots=True)
class Counters:
    """What a worker did since it started; written by the loop, read by the heartbeat."""

    requests: int = 0
    errors: int = 0
    retries: int = 0  # requests that were put off after an error that may pass
    dropped: int = 0  # answered by another worker first, or cancelled
    deduplicated: int = 0  # that got the answer of an equal request in their window
    cache_hits: int = 0  # that got an answer from the cache
    cache_misses: int = 0  # that did not; neither is counted without a cache
    batches: int = 0
    tokens: int = 0
    padded_tokens: int = 0  # tokens plus padding
    engine_us: int = 0  # microseconds in the engine, by the clock on the wall
    take_cpu_us: int = 0  # CPU time of each stage's own thread
    encode_cpu_us: int = 0
    plan_cpu_us: int = 0
    run_cpu_us: int = 0
    finish_cpu_us: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the CPU time that the block takes in this thread."""
        started = time.thread_time_ns()
        try:
            yield
        finally:
            self.add(**{f"{name}_cpu_us": (time.thread_time_ns() - started) // 1000})

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}
