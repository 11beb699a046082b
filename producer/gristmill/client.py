"""The blocking client."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Self, Unpack

from gristmill import control
from gristmill.calls import CallKeywords, CallOptions, Item, RequestId
from gristmill.control import DeadLetter
from gristmill.core import Core, Depth
from gristmill.driver import ERRORS, Connections, translate
from gristmill.ops import Command, Op, Read, Script, Sleep, Steps, T
from gristmill.stream import Stream, StreamKeywords
from gristmill.wire import MAX_BODY_BYTES, Result


@dataclass(frozen=True, slots=True)
class _Process:
    """What one process has of a client: a fork shares none of it with its parent."""

    core: Core
    redis: Connections
    reader: threading.Condition = field(default_factory=threading.Condition)
    reading: set[str] = field(default_factory=set)  # queues whose reply stream some thread reads now


class Client:
    """Submits requests and collects results. Thread-safe and fork-safe; starts no thread.

    ``max_length`` is the admission bound where the queue's config names none; ``max_body_bytes`` the largest
    request; ``retry_s`` how long a call waits for an unavailable Redis before it raises
    :class:`~gristmill.errors.BrokerUnavailable`.
    """

    def __init__(
        self,
        url: str,
        *,
        max_length: int = 100_000,
        max_body_bytes: int = MAX_BODY_BYTES,
        retry_s: float = 30.0,
    ) -> None:
        self._url = url
        self._first = Core(max_length=max_length, max_body_bytes=max_body_bytes, retry_s=retry_s)
        self._processes: dict[int, _Process] = {}
        self._here()  # a URL that cannot be used is refused now

    def _here(self) -> _Process:
        """Return this process's part; the first call after a fork makes it."""
        pid = os.getpid()
        if (found := self._processes.get(pid)) is None:
            fresh = _Process(self._first.forked() or self._first, Connections(self._url))
            # Several threads may get here: setdefault gives all of them the same one, in one step, or some
            # would use the parent's sockets. A lock would not do: a thread of the parent may have held it.
            found = self._processes.setdefault(pid, fresh)
            for other in [*self._processes]:
                if other != pid:
                    self._processes.pop(other, None)
        return found

    @property
    def _core(self) -> Core:
        return self._here().core

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Requests that were submitted stay submitted."""
        self._here().redis.close()

    def submit(
        self,
        queue: str,
        item: Item,
        *,
        id: str | None = None,  # noqa: A002 - the wire contract's name
        reply: bool = True,
        **call: Unpack[CallKeywords],
    ) -> RequestId:
        """Queue one request and return its ID; with an ID that is known already nothing is queued again.

        ``item`` is a text, a (text, pair) tuple, or the body as a mapping; ``call`` is described at
        :class:`~gristmill.calls.CallKeywords`. ``reply=False`` spares the push of a result that another
        process will read. Raises QueueFull, InvalidRequestError, BrokerUnavailable.
        """
        ids = None if id is None else [id]
        return self._run(self._core.submit(queue, [item], ids, CallOptions(**call), reply=reply))[0]

    def submit_many(
        self,
        queue: str,
        items: Iterable[Item],
        *,
        ids: Sequence[str] | None = None,
        reply: bool = True,
        **call: Unpack[CallKeywords],
    ) -> list[RequestId]:
        """Queue many requests, in chunks of one script call. All are checked before the first is sent.

        Raises as :meth:`submit`; QueueFull names the requests that were accepted.
        """
        return self._run(self._core.submit(queue, items, ids, CallOptions(**call), reply=reply))

    def result(self, request_id: str, timeout_s: float = 30.0, *, queue: str | None = None) -> Result:
        """Wait for a result. ``queue`` is needed for an ID that did not come from :meth:`submit`.

        Raises ResultTimeout; the request goes on, and may be asked for again.
        """
        return self._run(self._core.result(request_id, queue, timeout_s))

    def score(
        self,
        queue: str,
        item: Item,
        timeout_s: float = 30.0,
        **call: Unpack[CallKeywords],
    ) -> Any:
        """Submit one item and return its value. Raises ScoringError or RequestExpired where it failed."""
        return self._run(self._core.score(queue, item, timeout_s, CallOptions(**call)))

    def score_many(
        self, queue: str, items: Iterable[Item], **keywords: Unpack[StreamKeywords]
    ) -> list[Result]:
        """Score ``items`` and return one result each, in their order; takes :meth:`stream`'s keywords."""
        return [result for _, result in self.stream(queue, items, ordered=True, **keywords)]

    def as_completed(
        self, queue: str, items: Iterable[Item], **keywords: Unpack[StreamKeywords]
    ) -> Iterator[tuple[int, Result]]:
        """Yield (index, result) as results come in; takes :meth:`stream`'s keywords."""
        return self.stream(queue, items, ordered=False, **keywords)

    def stream(
        self,
        queue: str,
        items: Iterable[Item],
        *,
        ordered: bool = True,
        **keywords: Unpack[StreamKeywords],
    ) -> Iterator[tuple[int, Result]]:
        """Score any number of items with bounded memory and yield (index, result).

        An item that cannot be submitted comes back as an error result in its place. ``keywords`` are
        described at :class:`~gristmill.stream.StreamKeywords`.
        """
        stream = Stream(self._core, queue, items, ordered=ordered, **keywords)
        return self._iterate(stream)

    def _iterate(self, stream: Stream) -> Iterator[tuple[int, Result]]:
        with closing(stream):
            while batch := self._run(stream.step()):
                yield from batch

    def queues(self) -> list[str]:
        """Return the names of all queues that were ever submitted to."""
        return self._run(self._core.queues())

    def depth(self, queue: str) -> Depth:
        """Return what a queue holds."""
        return self._run(self._core.depth(queue))

    def workers(self, queue: str) -> list[dict[str, str]]:
        """Return the heartbeat fields of each live worker of a queue."""
        return self._run(self._core.workers(queue))

    def cancel(self, queue: str, *request_ids: str) -> dict[str, str]:
        """Cancel requests and return the status that each has now.

        ``cancelled``: it has no other result, and never will; who waits for it is told at once if the ID came
        from :meth:`submit`, else within a second or two. ``ok``, ``error``, ``expired``, or ``done`` (it was
        only pushed): too late. ``unknown``: never submitted, or its result was not kept. What runs already
        is not interrupted, its result is dropped.
        """
        return self._run(control.cancel(self._core, queue, request_ids))

    def dead_letters(
        self, queue: str, ids: Iterable[str] | None = None, *, limit: int | None = None
    ) -> list[DeadLetter]:
        """Return requests that were given up, the oldest first: all, or those with ``ids``.

        An ID may be the request's or the letter's own.
        """
        return self._run(control.dead_letters(self._core, queue, ids, limit))

    def retry_dead(self, queue: str, ids: Iterable[str] | None) -> dict[str, str]:
        """Queue dead letters again as fresh requests; None: all. Returns what became of each request.

        ``queued``; ``full``: the queue takes no more now; ``answered``: its ID waits again or has another
        result by now; ``gone``: no such letter; ``unusable``: it has no legal request ID. In one atomic step
        its result is ``pending`` again and its letter deleted; what is not queued keeps its letter.
        """
        return self._run(control.retry_dead(self._core, queue, ids))

    def purge_dead(
        self, queue: str, ids: Iterable[str] | None = None, *, older_than_s: float | None = None
    ) -> int:
        """Delete dead letters (by ID, by age, or all) and return how many."""
        return self._run(control.purge_dead(self._core, queue, ids, older_than_s))

    def pause(self, queue: str) -> None:
        """Have the workers take nothing more; what they have is finished, and submits are still accepted.

        It takes effect within two seconds.
        """
        self._run(control.pause(self._core, queue, paused=True))

    def resume(self, queue: str) -> None:
        """Undo :meth:`pause`."""
        self._run(control.pause(self._core, queue, paused=False))

    def set_limit(self, queue: str, max_length: int | None) -> None:
        """Set how many requests the queue takes, for all its clients; None: each client's own bound."""
        self._run(control.set_limit(self._core, queue, max_length))

    def _run(self, steps: Steps[T]) -> T:
        """Carry out what a core generator asks for."""
        here = self._here()
        try:
            op = next(steps)
            while True:
                try:
                    reply = self._do(here, op)
                except ERRORS as error:
                    op = steps.throw(translate(error, self._url))
                else:
                    op = steps.send(reply)
        except StopIteration as stop:
            value: T = stop.value
            return value

    def _do(self, here: _Process, op: Op) -> Any:
        match op:
            case Command(args):
                return here.redis.call(*args)
            case Script(name, keys, args):
                return here.redis.run(name, keys, args)
            case Read():
                return self._read(here, op)
            case Sleep(seconds):
                return time.sleep(seconds)

    def _read(self, here: _Process, op: Read) -> None:
        with here.reader:
            if op.mailbox.version != op.seen:
                return
            if op.mailbox.queue in here.reading:  # another thread reads for all
                here.reader.wait(op.block_ms / 1000)
                return
            here.reading.add(op.mailbox.queue)
        try:
            op.mailbox.feed(here.redis.call(*op.mailbox.read_command(op.block_ms)))
        finally:
            with here.reader:
                here.reading.discard(op.mailbox.queue)
                here.reader.notify_all()
