"""From what a caller gives to requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypedDict

from gristmill import wire
from gristmill.errors import InvalidRequestError
from gristmill.keys import DEFAULT, PRIORITIES
from gristmill.wire import Request

Item = str | tuple[str, str] | Mapping[str, Any] | InvalidRequestError

CHUNK_REQUESTS: Final = 256  # per script call
CHUNK_BYTES: Final = 4 * 1024 * 1024


class RequestId(str):
    """A request's ID, and where its result will be."""

    __slots__ = ("queue", "reply")
    queue: str
    reply: str | None

    def __new__(cls, value: str, queue: str, reply: str | None) -> Self:
        self = super().__new__(cls, value)
        self.queue = queue
        self.reply = reply
        return self

    def __reduce__(self) -> tuple[type[RequestId], tuple[str, str, str | None]]:
        return RequestId, (str(self), self.queue, self.reply)


class CallKeywords(TypedDict, total=False):
    """What a caller may say about requests beside their content.

    ``options`` go to the model's task (``top_k``, ``truncate``, ``encoding``); ``ttl_s`` is how long to keep
    the result; after ``deadline_s`` seconds the request is not run any more; ``trace`` is a W3C traceparent;
    ``priority`` is ``high``, ``default`` or ``low``; ``wait_s`` (0) is how long to wait, with growing pauses,
    while the queue is full, before QueueFull is raised.
    """

    options: Mapping[str, Any] | None
    ttl_s: int | None
    deadline_s: float | None
    trace: str | None
    priority: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class CallOptions:
    """:class:`CallKeywords` with their defaults."""

    options: Mapping[str, Any] | None = None
    ttl_s: int | None = None
    deadline_s: float | None = None
    trace: str | None = None
    priority: str = DEFAULT
    wait_s: float = 0.0

    def wait_ends(self) -> float:
        """Return when to stop waiting for a full queue, by the monotonic clock."""
        check_seconds("wait_s", self.wait_s)
        return time.monotonic() + self.wait_s

    def request(self, item: Item, request_id: str | None, reply: str | None, limit: int) -> Request:
        """Build the request of ``item``; raise :class:`InvalidRequestError` where that cannot be."""
        ttl_s, trace = self.ttl_s, self.trace
        if ttl_s is not None and (type(ttl_s) is not int or not 0 <= ttl_s <= wire.MAX_TTL_S):
            raise InvalidRequestError(f"ttl_s is {ttl_s!r}: use a whole number from 0 to {wire.MAX_TTL_S}")
        if trace is not None and not wire.is_trace(trace):
            raise InvalidRequestError(
                f"trace is {trace!r}: use a W3C traceparent: 00-<32 hex>-<16 hex>-<2 hex>"
            )
        check_priority(self.priority)
        deadline_ms = None
        if self.deadline_s is not None:
            check_seconds("deadline_s", self.deadline_s)
            deadline_ms = int((time.time() + min(self.deadline_s, wire.MAX_TTL_S)) * 1000)
        return Request(
            id=wire.new_id() if request_id is None else wire.check_id(request_id),
            body=wire.encode_body(make_body(item, self.options), limit),
            reply=reply,
            deadline_ms=deadline_ms,
            ttl_s=self.ttl_s,
            trace=self.trace,
        )


def make_body(item: Item, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the JSON body of an item: a text, a pair of texts, or a body given as a mapping."""
    if isinstance(item, InvalidRequestError):
        raise item
    if isinstance(item, str):
        body: dict[str, Any] = {"text": item}
    elif isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item):
        body = {"text": item[0], "pair": item[1]}
    elif isinstance(item, Mapping):
        body = dict(item)
    else:
        raise InvalidRequestError(
            f"an item is a text, a (text, pair) tuple or a mapping, not {type(item).__name__}"
        )
    if options:
        own = body.get("options") or {}
        if not isinstance(options, Mapping) or not isinstance(own, Mapping):
            raise InvalidRequestError("options have to be a mapping of names to values")
        body["options"] = {**options, **own}
    return body


def check_seconds(name: str, seconds: float) -> None:
    """Raise InvalidRequestError unless ``seconds`` is a number of at least 0; it may be infinite."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidRequestError(f"{name} is {seconds!r}: use a number of seconds from 0")


def check_priority(priority: str) -> str:
    """Return ``priority`` if it is one, else raise InvalidRequestError."""
    if priority not in PRIORITIES:
        raise InvalidRequestError(f"priority is {priority!r}: use {', '.join(PRIORITIES)}")
    return priority


def chunks(requests: Sequence[Request]) -> Iterable[Sequence[Request]]:
    """Cut ``requests`` into pieces that one script call can carry."""
    start, size = 0, 0
    for i, request in enumerate(requests):
        size += len(request.body)
        if i > start and (i - start >= CHUNK_REQUESTS or size > CHUNK_BYTES):
            yield requests[start:i]
            start, size = i, len(request.body)
    if start < len(requests):
        yield requests[start:]
