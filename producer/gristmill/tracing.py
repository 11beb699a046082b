"""W3C trace context of requests, and OpenTelemetry spans where the caller's program uses that library.

Nothing here imports it: a program that has not done so has no span to pass on, and pays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from gristmill.calls import CallOptions

_API: Final = "opentelemetry.trace"
_KINDS: Final = {
    "send": "PRODUCER",
    "score": "CLIENT",
}  # by what the caller does; a score waits for the answer


def current() -> str | None:
    """Return the traceparent of the span that is active here, None where there is none."""
    api = sys.modules.get(_API)
    return None if api is None else _traceparent(api.get_current_span())


@contextmanager
def span(what: str, queue: str, items: Iterable[Any], call: CallOptions) -> Iterator[CallOptions]:
    """Cover the block by a span and yield ``call`` with its traceparent, unless it has one."""
    api = sys.modules.get(_API)
    if api is None or call.trace is not None:
        yield call
        return
    attributes: dict[str, Any] = {
        "messaging.system": "gristmill",
        "messaging.operation.name": what,
        "messaging.operation.type": "send",
        "messaging.destination.name": str(queue),
    }
    if isinstance(items, Sized) and len(items) != 1:
        attributes["messaging.batch.message_count"] = len(items)
    kind = api.SpanKind[_KINDS[what]]
    made = api.get_tracer("gristmill").start_span(f"{what} {queue}", kind=kind, attributes=attributes)
    try:
        yield replace(call, trace=_traceparent(made))
    except Exception as error:
        made.record_exception(error)
        made.set_status(api.StatusCode.ERROR, str(error))
        raise
    finally:
        made.end()


def _traceparent(active: Any) -> str | None:
    context = active.get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
