"""OpenTelemetry spans of batches and of the requests in them; the only module that imports that library."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from gristmill_worker.jobs import Job, Ran, everyone
from gristmill_worker.telemetry import logger

_GROUP: Final = "opentelemetry_traces_exporter"  # of entry points: how its packages offer exporters


class Spans:
    """Makes spans of what ran, and sends them from a thread of the library's own."""

    def __init__(self, exporters: list[str], worker: str, queue: str, model: str) -> None:
        given = OTELResourceDetector().detect().attributes  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
        ours = {SERVICE_NAME: "gristmill-worker", SERVICE_INSTANCE_ID: worker}
        self._provider = TracerProvider(resource=Resource.create({**ours, **given}), shutdown_on_exit=False)
        for name in exporters:
            found = list(entry_points(group=_GROUP, name=name))
            if not found:
                raise LookupError(f"no package that is installed offers the exporter {name!r}")
            self._provider.add_span_processor(BatchSpanProcessor(found[0].load()()))
        self._tracer = self._provider.get_tracer("gristmill_worker")
        self._about: dict[str, AttributeValue] = {
            "messaging.system": "gristmill",
            "messaging.destination.name": queue,
            "messaging.consumer.group.name": "workers",
            "gristmill.model": model,
            "gristmill.worker": worker,
        }
        self._queue = queue

    def ran(self, ran: Ran) -> None:
        """Make a span of the batch, linked to each traced request, and one in each such request's trace."""
        try:
            traced = [(job, context) for job in everyone(ran.jobs) if (context := _sampled(job))]
            if traced:
                self._record(ran, traced)
        except Exception:  # noqa: BLE001 - no request may suffer from being watched
            logger().exception("span_failed")

    def _record(self, ran: Ran, traced: list[tuple[Job, SpanContext]]) -> None:
        run = ran.run
        starts = int(run.started_ms * 1e6)
        ends = starts + int(run.run_ms * 1e6)
        shape: dict[str, AttributeValue] = {
            "messaging.batch.message_count": run.size,
            "gristmill.batch.shape": list(run.shape),
        }
        batch = self._tracer.start_span(
            f"run {self._queue}",
            context=Context(),  # of no trace but its own: it belongs to all requests in it
            kind=SpanKind.INTERNAL,
            attributes={**self._about, **shape},
            links=[Link(context, {"messaging.message.id": job.request.id}) for job, context in traced],
            start_time=starts,
        )
        _end(batch, ran.error, ends)
        for job, context in traced:
            mine: dict[str, AttributeValue] = {
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.message.id": job.request.id,
                "gristmill.tokens": job.item.length,
                "gristmill.deliveries": job.delivery.deliveries,
                "gristmill.queued_ms": max(run.started_ms - job.delivery.enqueued_ms, 0.0),
            }
            span = self._tracer.start_span(
                f"process {self._queue}",
                context=set_span_in_context(NonRecordingSpan(context)),
                kind=SpanKind.CONSUMER,
                attributes={**self._about, **shape, **mine},
                links=[Link(batch.get_span_context())],
                start_time=starts,
            )
            _end(span, ran.error, ends)

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()


def _sampled(job: Job) -> SpanContext | None:
    """Return the context that the request came with, if its trace is one that is recorded."""
    if job.request.trace is None:
        return None
    _, trace_id, span_id, flags = job.request.trace.split("-")
    given = TraceFlags(int(flags, 16))
    if not given.sampled:
        return None
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=given)


def _end(span: Span, error: str, ends: int) -> None:
    if error:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(ends)
