"""Control of requests and queues: cancelling, dead letters, pausing, the bound; no I/O, like the core."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gristmill import keys, wire
from gristmill.calls import CHUNK_REQUESTS, RequestId, check_seconds
from gristmill.core import PENDING_TTL_S, Core
from gristmill.errors import ErrorCode, InvalidRequestError, Status
from gristmill.ops import Command, Script, Steps
from gristmill.wire import REPLY_CAP, Result

CANCELLED_TTL_S: Final = 3600  # the result of a cancelled request is kept for
CANCELLED_IDS: Final = 100_000  # that workers skip, at the most; older ones run, and their results drop
MOST_AGE_S: Final = 1e10  # nothing is older
PAGE_LETTERS: Final = 50  # a letter may have a megabyte
_OURS: Final = {b"reason", b"deliveries", b"worker"}
_RETRIED: Final = {1: "queued", 0: "gone", -1: "full", -2: "answered"}


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that was given up.

    ``letter`` is its own ID among the dead letters; ``id`` the request's (None where it has no legal one);
    ``died_ms`` a Unix time; ``body`` and ``fields`` (which hold it too) are the request as it was submitted.
    """

    letter: str
    id: str | None
    reason: str
    deliveries: int
    worker: str
    died_ms: int
    priority: str
    body: bytes
    fields: dict[bytes, bytes]


def cancel(core: Core, queue: str, ids: Sequence[str]) -> Steps[dict[str, str]]:
    """Cancel requests; returns the status that each has now. May be repeated."""
    name = keys.cancelled(keys.check_queue(queue))
    wanted = list({wire.check_id(request_id): request_id for request_id in ids}.values())
    error = (ErrorCode.CANCELLED, "it was cancelled")
    ends = time.monotonic() + core.retry_s
    outcome: dict[str, str] = {}
    for at in range(0, len(wanted), CHUNK_REQUESTS):
        chunk = wanted[at : at + CHUNK_REQUESTS]
        names = [name]
        args: list[Any] = [CANCELLED_TTL_S, PENDING_TTL_S * 1000, CANCELLED_IDS, REPLY_CAP]
        for request_id in chunk:
            reply = request_id.reply if isinstance(request_id, RequestId) else None
            names += [keys.result(queue, request_id), keys.reply(queue, reply) if reply else name]
            args += [request_id, wire.encode_result(Result(str(request_id), Status.CANCELLED, error=error))]
        found = yield from core.persist(Script("cancel", names, args), ends)
        outcome |= {str(each): status.decode() for each, status in zip(chunk, found, strict=True)}
    return outcome


def dead_letters(
    core: Core, queue: str, ids: Iterable[str] | None, limit: int | None
) -> Steps[list[DeadLetter]]:
    """Return dead letters, the oldest first: all, or those with ``ids`` (a letter's or a request's)."""
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidRequestError(f"limit is {limit!r}: use a whole number from 0, or None for all")
    name, wanted = keys.dead(keys.check_queue(queue)), _ids(ids)
    ends = time.monotonic() + core.retry_s
    found: list[DeadLetter] = []
    start = "-"
    while limit is None or len(found) < limit:
        page = yield from core.persist(Command(("XRANGE", name, start, "+", "COUNT", PAGE_LETTERS)), ends)
        letters = [_letter(*entry) for entry in page]
        found += [each for each in letters if wanted is None or {each.letter, each.id} & wanted]
        if len(page) < PAGE_LETTERS:
            break
        start = f"({page[-1][0].decode()}"
    return found[:limit]


def retry_dead(core: Core, queue: str, ids: Iterable[str] | None) -> Steps[dict[str, str]]:
    """Put dead letters back into the queue. Repeated blindly: a letter that is gone is not queued again."""
    wanted = _ids(ids)
    found = yield from dead_letters(core, queue, wanted, None)
    known = {letter.letter for letter in found} | {letter.id for letter in found}
    outcome = {name: "gone" for name in wanted or () if name not in known}
    outcome |= {letter.letter: "unusable" for letter in found if letter.id is None}
    usable = [(letter.letter, letter.id) for letter in found if letter.id is not None]
    ends = time.monotonic() + core.retry_s
    for at in range(0, len(usable), CHUNK_REQUESTS):
        chunk = usable[at : at + CHUNK_REQUESTS]
        names = [keys.dead(queue), *keys.streams(queue), keys.config(queue)]
        names += [keys.result(queue, request_id) for _, request_id in chunk]
        args = [core.max_length, PENDING_TTL_S, *(letter for letter, _ in chunk)]
        codes = yield from core.persist(Script("retry", names, args), ends)
        outcome |= {request_id: _RETRIED[code] for (_, request_id), code in zip(chunk, codes, strict=True)}
    return outcome


def purge_dead(core: Core, queue: str, ids: Iterable[str] | None, older_than_s: float | None) -> Steps[int]:
    """Delete dead letters and return how many."""
    name = keys.dead(keys.check_queue(queue))
    ends = time.monotonic() + core.retry_s
    if ids is not None:
        if older_than_s is not None:
            raise InvalidRequestError("name either the IDs to purge or an age")
        entries = [letter.letter for letter in (yield from dead_letters(core, queue, ids, None))]
        removed: int = 0
        if entries:
            removed = yield from core.persist(Command(("XDEL", name, *entries)), ends)
        return removed
    if older_than_s is None:
        removed = yield from core.persist(Command(("XTRIM", name, "MAXLEN", "0")), ends)
        return removed
    check_seconds("older_than_s", older_than_s)
    age_ms = int(min(older_than_s, MOST_AGE_S) * 1000)
    removed = yield from core.persist(Script("purge", [name], [age_ms]), ends)
    return removed


def pause(core: Core, queue: str, *, paused: bool) -> Steps[None]:
    """Have the workers stop taking requests, or go on."""
    name = keys.config(keys.check_queue(queue))
    command = ("HSET", name, "paused", 1) if paused else ("HDEL", name, "paused")
    yield from core.persist(Command(command), time.monotonic() + core.retry_s)


def set_limit(core: Core, queue: str, max_length: int | None) -> Steps[None]:
    """Set the admission bound of a queue, or leave it to the clients again."""
    name = keys.config(keys.check_queue(queue))
    if max_length is not None and (type(max_length) is not int or not 0 <= max_length <= 10**12):
        raise InvalidRequestError(f"the bound is {max_length!r}: use a whole number from 0, or None")
    command = ("HDEL", name, "max_length") if max_length is None else ("HSET", name, "max_length", max_length)
    yield from core.persist(Command(command), time.monotonic() + core.retry_s)


def _ids(ids: Iterable[str] | None) -> set[str] | None:
    if ids is None:
        return None
    return {ids} if isinstance(ids, str) else set(ids)


def _letter(entry: bytes, flat: Sequence[bytes]) -> DeadLetter:
    at = 0
    while at < 6 and flat[at : at + 1] and flat[at] in _OURS:
        at += 2
    head: dict[bytes, Any] = wire.pairs(flat[:at])
    priority = keys.DEFAULT
    if flat[at : at + 1] == [b"priority"] and (name := flat[at + 1].decode("latin-1")) in keys.PRIORITIES:
        priority = name
        at += 2
    fields = wire.pairs(flat[at:])
    deliveries = head.get(b"deliveries", b"")
    return DeadLetter(
        letter=entry.decode(),
        id=_legal_id(fields.get(b"id")),
        reason=head.get(b"reason", b"").decode("utf-8", "replace"),
        deliveries=int(deliveries) if deliveries.isdigit() else 0,
        worker=head.get(b"worker", b"").decode("utf-8", "replace"),
        died_ms=int(entry.partition(b"-")[0]),
        priority=priority,
        body=fields.get(b"body", b""),
        fields=fields,
    )


def _legal_id(data: bytes | None) -> str | None:
    try:
        return None if data is None else wire.check_id(data.decode())
    except (UnicodeDecodeError, InvalidRequestError):
        return None
