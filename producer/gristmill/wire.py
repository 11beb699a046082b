"""The records of the wire contract and their codec (JSON; see WIRE.md). No I/O, no Redis."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import orjson

from gristmill import keys
from gristmill.errors import (
    ErrorCode,
    InvalidRequestError,
    RequestCancelled,
    RequestExpired,
    ScoringError,
    Status,
    WireError,
)

T = TypeVar("T")

MAX_BODY_BYTES: Final = 1024 * 1024
MAX_TTL_S: Final = 365 * 24 * 3600
PENDING: Final = b"pending"
REPLY_CAP: Final = 10_000  # entries of a reply stream; clients keep fewer requests in flight
DONE: Final = b"done"  # the mark that a reply-only request leaves behind for a while

_ID = re.compile(r"[^\x00-\x20\x7f]{1,200}")
# W3C trace context: version, trace ID, parent ID, flags; neither ID is zero.
_TRACE = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY

_TYPE_NAMES: Final = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a queue.

    ``body`` is the JSON object that the model's task defines, as bytes. ``deadline_ms`` is a Unix time;
    ``ttl_s`` the seconds to keep the result (0: it is only pushed to ``reply``, None: the worker's default);
    ``trace`` a W3C traceparent.
    """

    id: str
    body: bytes
    reply: str | None = None
    deadline_ms: int | None = None
    ttl_s: int | None = None
    trace: str | None = None

    def fields(self) -> list[bytes | str | int]:
        """Return the stream entry's field names and values, alternating."""
        flat: list[bytes | str | int] = ["id", self.id, "body", self.body]
        optional = (
            ("reply", self.reply),
            ("deadline", self.deadline_ms),
            ("ttl", self.ttl_s),
            ("trace", self.trace),
        )
        for name, value in optional:
            if value is not None:
                flat += [name, value]
        return flat


@dataclass(frozen=True, slots=True)
class Refusal:
    """A stream entry that is no request: why, and who can be told. ``id`` is None if it is not legal."""

    id: str | None
    error: WireError
    reply: str | None = None
    ttl_s: int | None = None
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The final word on one request.

    ``status`` is a :class:`~gristmill.errors.Status`, as text; ``error`` is ``(code, message)``.
    ``timing_ms`` has ``queued``, ``encode`` and ``run``; ``batch`` has ``size`` and ``shape``;
    ``trace`` is the request's. ``attempts`` counts its deliveries to a worker, this one included;
    ``cached``: the worker knew the answer.
    """

    id: str
    status: str
    value: Any = None
    error: tuple[str, str] | None = None
    model: str | None = None
    worker: str | None = None
    tokens: int | None = None
    truncated: bool = False
    timing_ms: Mapping[str, float] = field(default_factory=dict)
    batch: Mapping[str, Any] | None = None
    trace: str | None = None
    attempts: int = 1
    cached: bool = False

    @property
    def ok(self) -> bool:
        return self.status == Status.OK

    def unwrap(self) -> Any:
        """Return the value, or raise ScoringError: RequestExpired, RequestCancelled, or itself."""
        if self.ok:
            return self.value
        code, message = self.error or (self.status, "no message")
        if self.status == Status.EXPIRED:
            raise RequestExpired(self.id, message)
        if self.status == Status.CANCELLED:
            raise RequestCancelled(self.id, message)
        raise ScoringError(self.id, code, message)


def new_id() -> str:
    """Return a UUID version 7 (RFC 9562): 48 bits of Unix milliseconds, then 74 random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    digits = f"{value:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def check_id(request_id: str) -> str:
    """Return ``request_id`` if it is legal: 1 to 200 characters, none of them a space or control."""
    if not isinstance(request_id, str) or not _ID.fullmatch(request_id) or not is_text(request_id):
        raise InvalidRequestError(
            f"request ID {str(request_id)[:80]!r} is not legal: use 1 to 200 characters, "
            "no spaces and no control characters"
        )
    return request_id


def is_text(text: str) -> bool:
    """Say whether ``text`` can be written as UTF-8 (lone surrogates cannot)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_trace(text: object) -> bool:
    """Say whether ``text`` is a W3C traceparent."""
    return isinstance(text, str) and _TRACE.fullmatch(text) is not None


def encode_body(body: Mapping[str, Any], limit: int = MAX_BODY_BYTES) -> bytes:
    """Return ``body`` as JSON, or raise :class:`InvalidRequestError`: not JSON, or over ``limit`` bytes."""
    try:
        encoded = orjson.dumps(body, option=_OPTIONS)
    except TypeError as error:
        raise InvalidRequestError(f"the request is not valid JSON: {error}") from error
    if len(encoded) > limit:
        raise InvalidRequestError(
            f"the request has {len(encoded)} bytes, the queue takes {limit}: shorten or split the text",
            ErrorCode.TOO_LARGE,
        )
    return encoded


def pairs(flat: Sequence[T]) -> dict[T, T]:
    """Return the names and values that Redis sends alternating."""
    each = iter(flat)
    return dict(zip(each, each, strict=True))


def decode_request(fields: Mapping[bytes, bytes], limit: int = MAX_BODY_BYTES) -> Request | Refusal:
    """Read a stream entry. What breaks the contract gives a :class:`Refusal` with whatever could be read."""
    try:
        return _read_request(fields, limit)
    except WireError:
        return _read_refusal(fields, limit)


def _read_request(fields: Mapping[bytes, bytes], limit: int) -> Request:
    return Request(
        id=_read_id(fields.get(b"id")),
        body=_read_body(fields.get(b"body"), limit),
        reply=_read_reply(fields.get(b"reply")),
        deadline_ms=_read_int(fields, b"deadline", 2**53),
        ttl_s=_read_int(fields, b"ttl", MAX_TTL_S),
        trace=_read_trace(trace) if (trace := fields.get(b"trace")) else None,
    )


def _read_refusal(fields: Mapping[bytes, bytes], limit: int) -> Refusal:
    """Read what can be read of an entry that is no request."""
    problems: list[WireError] = []

    def attempt(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except WireError as error:
            problems.append(error)
            return None

    request_id = attempt(lambda: _read_id(fields.get(b"id")))
    reply = attempt(lambda: _read_reply(fields.get(b"reply")))
    ttl_s = attempt(lambda: _read_int(fields, b"ttl", MAX_TTL_S))
    attempt(lambda: _read_int(fields, b"deadline", 2**53))
    attempt(lambda: _read_body(fields.get(b"body"), limit))
    return Refusal(request_id, problems[0], reply, ttl_s, _read_trace(fields.get(b"trace", b"")))


def decode_body(body: bytes) -> dict[str, Any]:
    """Return the body as a JSON object, or raise :class:`WireError`."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WireError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WireError(f"the body is {json_type(value)}, it has to be a JSON object")
    return value


def encode_result(result: Result) -> bytes:
    """Return the result's JSON. numpy arrays may stand in ``value``."""
    error = result.error
    record = {
        "id": result.id,
        "status": result.status,
        "value": result.value,
        "error": None if error is None else {"code": error[0], "message": error[1]},
        "model": result.model,
        "worker": result.worker,
        "tokens": result.tokens,
        "truncated": result.truncated,
        "timing_ms": result.timing_ms,
        "batch": result.batch,
        "attempts": result.attempts,
    }
    if result.trace is not None:
        record["trace"] = result.trace
    if result.cached:
        record["cached"] = True
    return orjson.dumps(record, option=_OPTIONS)


def decode_result(data: bytes) -> Result:
    """Read one result, or raise :class:`WireError`."""
    return _as_result(_loads(data))


def decode_results(data: bytes) -> list[Result]:
    """Read the list of results in a reply entry, or raise :class:`WireError`."""
    records = _loads(data)
    if not isinstance(records, list):
        raise WireError("a reply entry has to hold a list of results")
    return [_as_result(record) for record in records]


def json_type(value: Any) -> str:
    """Name the JSON type of ``value`` for a message."""
    if value is None or isinstance(value, bool):
        return str(orjson.dumps(value), "ascii")
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def _as_result(record: Any) -> Result:
    try:
        error = record.get("error")
        return Result(
            id=record["id"],
            status=record["status"],
            value=record.get("value"),
            error=(error["code"], error["message"]) if error else None,
            model=record.get("model"),
            worker=record.get("worker"),
            tokens=record.get("tokens"),
            truncated=bool(record.get("truncated")),
            timing_ms=record.get("timing_ms") or {},
            batch=record.get("batch"),
            trace=record.get("trace"),
            attempts=record.get("attempts") or 1,
            cached=bool(record.get("cached")),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise WireError(f"a result record lacks a field or has a wrong type: {error!r}") from error


def _loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise WireError(f"a result record is not valid JSON: {error}") from error


def _read_id(data: bytes | None) -> str:
    if data is None:
        raise WireError("the entry has no field 'id'")
    try:
        return check_id(data.decode())
    except (UnicodeDecodeError, InvalidRequestError) as error:
        raise WireError(f"the entry's ID is not legal: {error}") from error


def _read_body(data: bytes | None, limit: int) -> bytes:
    if data is None:
        raise WireError("the entry has no field 'body'")
    if len(data) > limit:
        message = f"the body has {len(data)} bytes, this worker takes {limit}: shorten or split the text"
        raise WireError(message, ErrorCode.TOO_LARGE)
    return data


def _read_reply(data: bytes | None) -> str | None:
    name = data.decode("ascii", "replace") if data is not None else None
    if name is not None and not keys.is_name(name):
        raise WireError("the field 'reply' is not a legal client name")
    return name


def _read_trace(data: bytes) -> str | None:
    """Read a traceparent. One that is none counts as not there, as its specification has it."""
    text = data.decode("ascii", "replace")
    return text if is_trace(text) else None


def _read_int(fields: Mapping[bytes, bytes], name: bytes, most: int) -> int | None:
    data = fields.get(name)
    if data is None:
        return None
    # Plain ASCII digits only: int() would also take "1_0", " 1 " and other scripts' digits.
    if not data.isdigit() or len(data) > 16 or int(data) > most:
        raise WireError(f"the field {name.decode()!r} has to be a whole number from 0 to {most}")
    return int(data)
