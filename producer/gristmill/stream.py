"""Streamed scoring over any number of items with bounded memory; no I/O (see :mod:`gristmill.core`)."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict, Unpack

from gristmill import keys, tracing, wire
from gristmill.calls import CHUNK_REQUESTS, CallOptions, Item, check_priority, check_seconds, chunks
from gristmill.core import BLOCK_S, CHECK_EVERY_S, FULL_BACKOFF_S, MAX_WINDOW, Core
from gristmill.errors import InvalidRequestError, ResultTimeout
from gristmill.keys import DEFAULT
from gristmill.ops import Command, Sleep, Steps
from gristmill.wire import Request, Result

_END: Final[Any] = object()
PULL_S: Final = 0.05  # a slow source of items must not hold back results


class StreamKeywords(TypedDict, total=False):
    """How to run a stream.

    ``window`` (1024): items taken from the source and not yet handed out, as a number or as a function that
    is asked before each (0: none now; never while nothing is out); ``timeout_s`` (None: for ever): raise
    ResultTimeout if nothing arrives for so long; ``options``, ``deadline_s`` and ``priority`` as for one
    request; ``ttl_s`` (0): by default results are pushed only and not kept; ``on_silence``: called about
    every second while nothing arrives, with the seconds since the last result; what it raises ends it.
    """

    window: int | Callable[[], int]
    timeout_s: float | None
    options: Mapping[str, Any] | None
    deadline_s: float | None
    priority: str
    ttl_s: int
    on_silence: Callable[[float], None] | None


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """:class:`StreamKeywords` with their defaults."""

    window: int | Callable[[], int] = 1024
    timeout_s: float | None = None
    options: Mapping[str, Any] | None = None
    deadline_s: float | None = None
    priority: str = DEFAULT
    ttl_s: int = 0
    on_silence: Callable[[float], None] | None = None


class Stream:
    """One run over ``items``: at most ``window`` of them are taken from the source and not yet handed out.

    A request that Redis lost (a restart without persistence) is submitted again. A full queue is waited for.
    """

    def __init__(
        self,
        core: Core,
        queue: str,
        items: Iterable[Item],
        *,
        ordered: bool,
        **keywords: Unpack[StreamKeywords],
    ) -> None:
        how = StreamOptions(**keywords)
        if not callable(how.window) and (type(how.window) is not int or not 1 <= how.window <= MAX_WINDOW):
            raise InvalidRequestError(f"window is {how.window!r}: use 1 to {MAX_WINDOW}")
        if how.timeout_s is not None:
            check_seconds("timeout_s", how.timeout_s)
        self._core = core
        self._queue = keys.check_queue(queue)
        self._items: Iterator[Item] = iter(items)
        self._call = CallOptions(
            how.options, how.ttl_s, how.deadline_s, tracing.current(), check_priority(how.priority)
        )
        self._ordered = ordered
        self._how_many = how.window
        self._timeout_s = how.timeout_s
        self._on_silence = how.on_silence
        self._box = core.mailbox(queue)
        self._exhausted = False
        self._pulled = 0
        self._released = 0
        self._sent: dict[str, tuple[int, Request]] = {}  # in flight, oldest first
        self._unsent: deque[tuple[int, Request]] = deque()  # not sent yet, or refused by a full queue
        self._retry_at, self._backoff_s = 0.0, FULL_BACKOFF_S[0]
        self._arrived: dict[str, Result] = {}
        self._ready: dict[int, Result] = {}
        self._heard_at = self._checked_at = time.monotonic()

    def step(self) -> Steps[list[tuple[int, Result]]]:
        """Return the next results with the indices of their items; an empty list at the end."""
        while True:
            if (yield from self._core.listen(self._box, time.monotonic() + self._core.retry_s)):
                self._checked_at = 0.0
            self._pull()
            yield from self._send()
            if out := self._release():
                return out
            if self._exhausted and not self._sent and not self._unsent:
                return []
            yield from self._receive()

    def close(self) -> None:
        """Stop waiting for what is in flight."""
        for request_id in self._sent:
            self._box.awaited.pop(request_id, None)

    def _pull(self) -> None:
        room = self._room()
        # Small refills make small batches: wait for a worthwhile chunk unless nothing else is in flight.
        if self._exhausted or (room < min(CHUNK_REQUESTS, self._window() // 4) and self._sent):
            return
        ends = time.monotonic() + PULL_S
        while self._room() > 0:
            item = next(self._items, _END)
            if item is _END:
                self._exhausted = True
                return
            index = self._pulled
            self._pulled += 1
            try:
                request = self._call.request(item, None, self._core.name, self._core.max_body_bytes)
            except InvalidRequestError as error:
                self._ready[index] = Result(
                    wire.new_id(), status="error", error=(str(error.code), error.message)
                )
            else:
                self._unsent.append((index, request))
            if time.monotonic() > ends:
                return

    def _window(self) -> int:
        return self._how_many if isinstance(self._how_many, int) else min(self._how_many(), MAX_WINDOW)

    def _room(self) -> int:
        return self._window() - (self._pulled - self._released)

    def _send(self) -> Steps[None]:
        if not self._unsent or time.monotonic() < self._retry_at:
            return
        batch = list(self._unsent)
        self._unsent.clear()
        # Known as awaited before Redis knows them: no result can come too early.
        for index, request in batch:
            self._sent[request.id] = (index, request)
            self._box.awaited[request.id] = self._arrived
        accepted = 0
        for chunk in chunks([request for _, request in batch]):
            if self._unsent:  # the queue is full: no use in sending the rest
                outcome = [-1] * len(chunk)
            else:
                outcome = yield from self._core.send(self._queue, chunk, self._call.priority)
            for request, code in zip(chunk, outcome, strict=True):
                if code == -1:
                    self._unsent.append(self._sent.pop(request.id))
                    self._box.awaited.pop(request.id, None)
                else:
                    accepted += 1
        self._backoff_s = FULL_BACKOFF_S[0] if accepted else min(2 * self._backoff_s, FULL_BACKOFF_S[1])
        if self._unsent:  # jittered, so that several producers do not come back together
            self._retry_at = time.monotonic() + self._backoff_s * random.uniform(0.5, 1.0)  # noqa: S311

    def _receive(self) -> Steps[None]:
        seen = self._box.version
        if self._take():
            return
        now = time.monotonic()
        if not self._sent:  # all was refused by a full queue
            self._check_timeout()
            yield Sleep(max(self._retry_at - now, 0.001))
            return
        block_s = BLOCK_S if self._timeout_s is None else min(BLOCK_S, self._timeout_s)
        if self._unsent:
            block_s = min(block_s, max(self._retry_at - now, 0.001))
        yield from self._core.read(self._box, block_s, seen, now + self._core.retry_s)
        # Only after a read is silence known to be one: the caller may have been away for long.
        if not self._take():
            now = time.monotonic()
            if now - max(self._checked_at, self._heard_at) > CHECK_EVERY_S:
                self._checked_at = now
                yield from self._look_up()
                if not self._take() and self._on_silence is not None:
                    self._on_silence(time.monotonic() - self._heard_at)
            self._check_timeout()

    def _take(self) -> bool:
        arrived, found = self._arrived, False
        while arrived:
            request_id, result = arrived.popitem()
            self._box.awaited.pop(request_id, None)  # still there where a look at the key found it
            if (sent := self._sent.pop(request_id, None)) is not None:
                self._ready[sent[0]] = result
                found = True
        if found:
            self._heard_at = time.monotonic()
        return found

    def _look_up(self) -> Steps[None]:
        """Nothing was pushed for a while: look at the keys, the oldest first; send again what Redis lost."""
        waiting = list(self._sent)
        for start in range(0, len(waiting), CHUNK_REQUESTS):
            oldest = waiting[start : start + CHUNK_REQUESTS]
            names = [keys.result(self._queue, request_id) for request_id in oldest]
            ends = time.monotonic() + self._core.retry_s
            states = yield from self._core.persist(Command(("MGET", *names)), ends)
            gone = []
            for request_id, state in zip(oldest, states, strict=True):
                if state in (None, wire.DONE):
                    gone.append(request_id)
                elif state != wire.PENDING:
                    self._arrived[request_id] = wire.decode_result(state)
            missing = yield from self._not_pushed(gone)
            for request_id in missing:
                self._unsent.append(self._sent.pop(request_id))
            if not missing:  # where the oldest are, the others are too; where they are not, look at all
                break

    def _not_pushed(self, gone: Sequence[str]) -> Steps[list[str]]:
        """Return those of ``gone`` that Redis lost, or whose push it lost, free to run again."""
        if not gone:
            return []
        ends = time.monotonic() + self._core.retry_s
        seen = -1
        while seen != self._box.version:  # mark and push are one step: what is marked can be read by now
            seen = self._box.version
            yield from self._core.read(self._box, 0.001, seen, ends)
        missing = [request_id for request_id in gone if request_id not in self._arrived]
        if missing:
            names = [keys.result(self._queue, request_id) for request_id in missing]
            yield from self._core.persist(Command(("DEL", *names)), ends)
        return missing

    def _release(self) -> list[tuple[int, Result]]:
        if self._ordered:
            out: list[tuple[int, Result]] = []
            while (result := self._ready.pop(self._released + len(out), None)) is not None:
                out.append((self._released + len(out), result))
        else:
            out = list(self._ready.items())
            self._ready.clear()
        self._released += len(out)
        return out

    def _check_timeout(self) -> None:
        if self._timeout_s is not None and time.monotonic() - self._heard_at > self._timeout_s:
            raise ResultTimeout(
                f"no result on queue {self._queue!r} for {self._timeout_s:g} s, "
                f"{len(self._sent)} requests are waiting; see 'gristmill queue {self._queue}'"
            )
