"""The client's logic without I/O, shared by :class:`gristmill.Client` and :class:`gristmill.AsyncClient`.

Every operation is a generator that yields what it wants from Redis or from the clock (see
:mod:`gristmill.ops`) and is sent the reply; the two clients only carry these out.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gristmill import keys, tracing, wire
from gristmill.calls import CallOptions, Item, RequestId, check_seconds, chunks
from gristmill.errors import BrokerUnavailable, InvalidRequestError, QueueFull, ResultTimeout
from gristmill.mailbox import Mailbox
from gristmill.ops import Command, Op, Read, Script, Sleep, Steps
from gristmill.wire import Request, Result

PENDING_TTL_S: Final = 7 * 24 * 3600  # a request may wait over a long weekend and still be known
REPLY_TTL_S: Final = 600  # a reply stream outlives its reader by this much
LISTEN_EVERY_S: Final = 2.0
BLOCK_S: Final = 1.0  # longest blocking read; every socket timeout has to be longer
CHECK_EVERY_S: Final = 1.0  # how often a waiter that is told nothing looks at the result key
FULL_BACKOFF_S: Final = 0.05, 1.0  # between two tries at a full queue
MAX_WINDOW: Final = 10_000  # finish.lua's cap on a reply stream: nothing awaited is ever trimmed


@dataclass(frozen=True, slots=True)
class Depth:
    """What a queue holds. ``waiting`` were not given to a worker yet, ``pending`` were.

    ``oldest_s`` is the age of the oldest of both, None where there is none; it takes no part in comparisons.
    """

    waiting: int
    pending: int
    dead: int
    max_length: int
    paused: bool = False
    oldest_s: float | None = field(default=None, compare=False)


class Core:
    """One client process's state: its name, its mailboxes, the queues it has announced."""

    def __init__(self, *, max_length: int, max_body_bytes: int, retry_s: float) -> None:
        self.max_length = max_length
        self.max_body_bytes = max_body_bytes
        self.retry_s = retry_s
        self.pid = os.getpid()
        self.name = process_name()
        self._mailboxes: dict[str, Mailbox] = {}
        self._announced: set[str] = set()

    def forked(self) -> Core | None:
        """Return a fresh core if this process is a fork of the one that made this core, else None."""
        if self.pid == os.getpid():
            return None
        return Core(max_length=self.max_length, max_body_bytes=self.max_body_bytes, retry_s=self.retry_s)

    def mailbox(self, queue: str) -> Mailbox:
        return self._mailboxes.setdefault(queue, Mailbox(queue, keys.reply(queue, self.name)))

    def submit(
        self, queue: str, items: Iterable[Item], ids: Sequence[str] | None, call: CallOptions, *, reply: bool
    ) -> Steps[list[RequestId]]:
        """Queue ``items``; all are checked before the first is sent. Raises QueueFull with the accepted."""
        with tracing.span("send", queue, items, call) as traced:
            return (yield from self._submit(queue, items, ids, traced, reply=reply))

    def _submit(
        self, queue: str, items: Iterable[Item], ids: Sequence[str] | None, call: CallOptions, *, reply: bool
    ) -> Steps[list[RequestId]]:
        keys.check_queue(queue)
        name = self.name if reply else None
        listed = list(items)
        if ids is not None and len(ids) != len(listed):
            raise InvalidRequestError(f"{len(listed)} items came with {len(ids)} IDs")
        requests = [
            call.request(item, ids[i] if ids is not None else None, name, self.max_body_bytes)
            for i, item in enumerate(listed)
        ]
        accepted: list[RequestId] = []
        ends = call.wait_ends()
        for chunk in chunks(requests):
            outcome = yield from self._admit(queue, chunk, call.priority, ends)
            accepted += [RequestId(r.id, queue, name) for r, o in zip(chunk, outcome, strict=True) if o >= 0]
            if -1 in outcome:
                raise QueueFull(queue, accepted, len(requests) - len(accepted))
        return accepted

    def _admit(self, queue: str, chunk: Sequence[Request], priority: str, ends: float) -> Steps[list[int]]:
        """Send ``chunk``; what a full queue refuses is sent again until ``ends``."""
        outcome = yield from self.send(queue, chunk, priority)
        delay = FULL_BACKOFF_S[0]
        while -1 in outcome and (left := ends - time.monotonic()) > 0:
            # Jittered, so that several producers do not come back together.
            yield Sleep(min(left, delay * random.uniform(0.5, 1.0)))  # noqa: S311 - no secret
            refused = [i for i, code in enumerate(outcome) if code == -1]
            again = yield from self.send(queue, [chunk[i] for i in refused], priority)
            for i, code in zip(refused, again, strict=True):
                outcome[i] = code
            delay = FULL_BACKOFF_S[0] if max(again) >= 0 else min(2 * delay, FULL_BACKOFF_S[1])
        return outcome

    def send(self, queue: str, chunk: Sequence[Request], priority: str) -> Steps[list[int]]:
        """Run submit.lua on ``chunk``; returns its outcomes. Repeated blindly: the script is idempotent."""
        args: list[Any] = [self.max_length, PENDING_TTL_S]
        for request in chunk:
            fields = request.fields()
            args += [len(fields) // 2, *fields]
        names = [keys.requests(queue, priority)]
        names += [stream for stream in keys.streams(queue) if stream != names[0]]
        names += [keys.config(queue), *(keys.result(queue, r.id) for r in chunk)]
        ends = time.monotonic() + self.retry_s
        outcome: list[int] = yield from self.persist(Script("submit", names, args), ends)
        if queue not in self._announced:
            yield from self.persist(Command(("SADD", keys.QUEUES, queue)), ends)
            self._announced.add(queue)
        return outcome

    def result(self, request_id: str, queue: str | None, timeout_s: float) -> Steps[Result]:
        """Wait for one result: pushed if this process asked for it, else by looking at its key."""
        if queue is None:
            if not isinstance(request_id, RequestId):
                raise InvalidRequestError("name the queue: result(request_id, queue='…')")
            queue = request_id.queue
        keys.check_queue(queue)
        wire.check_id(request_id)
        check_seconds("timeout_s", timeout_s)
        pushed = isinstance(request_id, RequestId) and request_id.reply == self.name
        return (yield from self._await(str(request_id), queue, timeout_s, pushed=pushed, check_at=0.0))

    def score(self, queue: str, item: Item, timeout_s: float, call: CallOptions) -> Steps[Any]:
        """Submit one item and wait for its value."""
        with tracing.span("score", queue, [item], call) as traced:
            return (yield from self._score(queue, item, timeout_s, traced))

    def _score(self, queue: str, item: Item, timeout_s: float, call: CallOptions) -> Steps[Any]:
        box = self.mailbox(keys.check_queue(queue))
        check_seconds("timeout_s", timeout_s)
        request = call.request(item, None, self.name, self.max_body_bytes)
        yield from self.listen(box, time.monotonic() + self.retry_s)
        if (yield from self._admit(queue, [request], call.priority, call.wait_ends())) == [-1]:
            raise QueueFull(queue, [], 1)
        # The mailbox was open before the request was sent: its result will be pushed.
        check_at = time.monotonic() + CHECK_EVERY_S
        result = yield from self._await(request.id, queue, timeout_s, pushed=True, check_at=check_at)
        return result.unwrap()

    def _await(
        self, request_id: str, queue: str, timeout_s: float, *, pushed: bool, check_at: float
    ) -> Steps[Result]:
        box = self.mailbox(queue)
        ends = time.monotonic() + timeout_s
        pause = 0.002
        state: bytes | None = wire.PENDING
        arrived: dict[str, Result] = {}
        box.awaited[request_id] = arrived
        try:
            while True:
                try:
                    if pushed and (yield from self.listen(box, ends, waits=False)):
                        check_at = 0.0  # finished before the stream was there: look at the key
                except BrokerUnavailable as error:
                    if not error.unwilling:
                        raise
                    pushed, check_at = False, 0.0  # a full Redis opens no stream, and can be read
                seen = box.version
                found = arrived.get(request_id) or box.unclaimed.pop(request_id, None)
                if found is not None:
                    return found
                now = time.monotonic()
                if now >= check_at:
                    state = yield from self.persist(Command(("GET", keys.result(queue, request_id))), ends)
                    if state not in (None, wire.PENDING, wire.DONE):
                        return wire.decode_result(state)
                    check_at = now + CHECK_EVERY_S if pushed else 0.0
                left = ends - time.monotonic()
                if left <= 0:
                    raise ResultTimeout(_timeout_message(request_id, queue, timeout_s, state))
                if pushed:
                    yield from self.read(box, min(left, BLOCK_S), seen, ends)
                else:
                    yield Sleep(min(pause, left))
                    pause = min(pause * 1.5, 0.25)
        finally:
            box.awaited.pop(request_id, None)

    def listen(self, box: Mailbox, ends: float, *, waits: bool = True) -> Steps[bool]:
        """Keep the reply stream alive; returns True if results may have been missed: look at their keys.

        Without ``waits`` a Redis that answers, and refuses for now, is not waited for: BrokerUnavailable.
        """
        if time.monotonic() < box.renew_at:
            return False
        script = Script("listen", [box.key], [REPLY_TTL_S, box.last_id])
        new = yield from self.persist(script, ends, unwilling=waits)
        box.renew_at = time.monotonic() + LISTEN_EVERY_S
        if new:  # and its IDs may be lower than those of the one before
            box.last_id = "0"
        return bool(new)

    def read(self, box: Mailbox, block_s: float, seen: int, ends: float) -> Steps[None]:
        """Wait up to ``block_s`` for anything new in the mailbox."""
        try:
            yield Read(box, max(1, int(block_s * 1000)), seen)
        except BrokerUnavailable as error:
            box.renew_at = 0.0  # after a restart the stream may be gone, or another server may have it
            if not error.retryable or time.monotonic() > ends:
                raise
            yield Sleep(0.05)

    def persist(self, op: Op, ends: float, *, unwilling: bool = True) -> Steps[Any]:
        """Carry out ``op``, again and again while Redis is away, until the monotonic time ``ends``.

        ``unwilling``: also while it answers and refuses, e.g. as it is full or loads its data.
        """
        delay = 0.05
        while True:
            try:
                return (yield op)
            except BrokerUnavailable as error:
                final = error.unwilling and not unwilling
                if final or not error.retryable or time.monotonic() + delay > ends:
                    raise
            yield Sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
            delay = min(2 * delay, 1.0)

    def queues(self) -> Steps[list[str]]:
        names = yield from self.persist(Command(("SMEMBERS", keys.QUEUES)), time.monotonic() + self.retry_s)
        decoded = (name.decode("utf-8", "replace") for name in names)
        return sorted(name for name in decoded if keys.is_name(name))  # anybody can write there

    def depth(self, queue: str) -> Steps[Depth]:
        names = [*keys.streams(keys.check_queue(queue)), keys.dead(queue), keys.config(queue)]
        script = Script("depth", names, [keys.GROUP])
        entries, pending, dead, age_ms, bound, paused = yield from self.persist(
            script, time.monotonic() + self.retry_s
        )
        return Depth(
            waiting=max(entries - pending, 0),
            pending=pending,
            dead=dead,
            max_length=self._bound(bound),
            paused=paused == b"1",
            oldest_s=None if age_ms < 0 else age_ms / 1000,
        )

    def _bound(self, configured: bytes | None) -> int:
        """Read the bound as submit.lua does: anything but digits is as if it were not there."""
        return int(configured) if configured and configured.isdigit() else self.max_length

    def workers(self, queue: str) -> Steps[list[dict[str, str]]]:
        """Return the heartbeat of each live worker: consumers of the group whose hash has not expired."""
        ends = time.monotonic() + self.retry_s
        live = []
        for consumer in (yield from self._consumers(keys.check_queue(queue), ends)):
            name = consumer[b"name"].decode("utf-8", "replace")  # anybody can write there
            beat = yield from self.persist(Command(("HGETALL", keys.worker(queue, name))), ends)
            if beat:
                found = {key.decode("utf-8", "replace"): value for key, value in wire.pairs(beat).items()}
                live.append({key: value.decode("utf-8", "replace") for key, value in found.items()})
        return live

    def _consumers(self, queue: str, ends: float) -> Steps[list[dict[bytes, Any]]]:
        info = Command(("XINFO CONSUMERS", keys.requests(queue), keys.GROUP))
        exists = yield from self.persist(Command(("EXISTS", keys.requests(queue))), ends)
        if not exists:
            return []
        try:
            found = yield from self.persist(info, ends)
        except BrokerUnavailable as error:
            if "NOGROUP" in str(error):  # no worker has ever served this queue
                return []
            raise
        return [wire.pairs(consumer) for consumer in found]


def process_name() -> str:
    """Return a name for this process, unique among all machines: host, pid and random digits."""
    host = "".join(c if c.isascii() and (c.isalnum() or c in ".-") else "-" for c in socket.gethostname())
    return f"{host[:32]}-{os.getpid()}-{os.urandom(4).hex()}"


def _timeout_message(request_id: str, queue: str, timeout_s: float, state: bytes | None) -> str:
    if state is None:
        why = "it is not known there: it was never submitted, or its result was not kept (see ttl_s)"
    elif state == wire.DONE:
        why = "it is done, and its result was only pushed to the process that asked for it (ttl_s=0)"
    else:
        why = "it is still waiting or running; ask again, or see 'gristmill queue'"
    return f"no result of request {request_id!r} on queue {queue!r} within {timeout_s:g} s: {why}"
