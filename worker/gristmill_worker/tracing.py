"""Who is told of each batch that ran: the log at its level debug, and OpenTelemetry where it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from gristmill_worker.jobs import Ran, everyone
from gristmill_worker.telemetry import logger


def watchers(
    env: Mapping[str, str], worker: str, queue: str, model: str, closing: ExitStack
) -> list[Callable[[Ran], None]]:
    """Return what to call with each batch; most workers have none. ``closing`` gets what to do at the end.

    What cannot be had is said once, and the worker serves without: the OTEL_* variables are other programs'
    too.
    """
    told: list[Callable[[Ran], None]] = []
    if logger().is_enabled_for(logging.DEBUG):
        told.append(_BatchLog())
    if exporters := wanted(env):
        try:
            from gristmill_worker.spans import Spans  # noqa: PLC0415 - only where it is wanted

            spans = Spans(exporters, worker, queue, model)
        except ImportError as error:
            advice = "pip install 'gristmill[otel]', or set OTEL_SDK_DISABLED=true"
            logger().warning("spans_off", error=f"the package {error.name!r} is missing: {advice}")
        except Exception as error:  # noqa: BLE001 - whatever an exporter says to its settings
            logger().warning("spans_off", error=str(error))
        else:
            told.append(spans.ran)
            closing.callback(spans.close)
            logging.getLogger("opentelemetry").addHandler(_Forward(logging.WARNING))
            logger().info("spans_on", exporters=exporters)
    return told


def wanted(env: Mapping[str, str]) -> list[str]:
    """Return the names of the span exporters that the OTEL_* variables ask for."""
    named = env.get("OTEL_TRACES_EXPORTER", "")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not named and any(env.get(name) for name in endpoints):
        named = "otlp"
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    protocol = (
        env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http"
    )
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    names = [name.strip() for name in named.split(",")]
    return [otlp if name == "otlp" else name for name in names if name not in {"", "none"}]


class _BatchLog:
    """Logs each batch with a number of its own and the requests in it."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, ran: Ran) -> None:
        self._number += 1
        run = ran.run
        ids = [job.request.id for job in everyone(ran.jobs)]
        logger().debug(
            "batch_done", batch=self._number, size=run.size, shape=run.shape, run_ms=run.run_ms, ids=ids
        )


class _Forward(logging.Handler):
    """Has what a library logs appear as the worker's own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        logger().warning("library", name=record.name, message=record.getMessage())
