"""The asyncio client: :class:`gristmill.Client` with ``await``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import closing
from typing import Any, Self, Unpack

from gristmill import control
from gristmill.aio_driver import AsyncConnections
from gristmill.calls import CallKeywords, CallOptions, Item, RequestId
from gristmill.control import DeadLetter
from gristmill.core import Core, Depth
from gristmill.driver import ERRORS, translate
from gristmill.ops import Command, Op, Read, Script, Sleep, Steps, T
from gristmill.stream import Stream, StreamKeywords
from gristmill.wire import MAX_BODY_BYTES, Result


class AsyncClient:
    """Submits requests and collects results from one event loop. See :class:`gristmill.Client`.

    Any number of coroutines may wait at once: one of them reads the process's reply stream for all.
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
        self._made = Core(max_length=max_length, max_body_bytes=max_body_bytes, retry_s=retry_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connect()

    def _connect(self) -> None:
        self._redis = AsyncConnections(self._url)
        self._reading: dict[str, asyncio.Future[None]] = {}  # by queue, done when its reader is back

    @property
    def _core(self) -> Core:
        self._check_process()
        return self._made

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Requests that were submitted stay submitted."""
        await self._redis.close()

    async def submit(
        self,
        queue: str,
        item: Item,
        *,
        id: str | None = None,  # noqa: A002 - the wire contract's name
        reply: bool = True,
        **call: Unpack[CallKeywords],
    ) -> RequestId:
        """See :meth:`gristmill.Client.submit`."""
        ids = None if id is None else [id]
        return (await self._run(self._core.submit(queue, [item], ids, CallOptions(**call), reply=reply)))[0]

    async def submit_many(
        self,
        queue: str,
        items: Iterable[Item],
        *,
        ids: Sequence[str] | None = None,
        reply: bool = True,
        **call: Unpack[CallKeywords],
    ) -> list[RequestId]:
        """See :meth:`gristmill.Client.submit_many`."""
        return await self._run(self._core.submit(queue, items, ids, CallOptions(**call), reply=reply))

    async def result(self, request_id: str, timeout_s: float = 30.0, *, queue: str | None = None) -> Result:
        """See :meth:`gristmill.Client.result`."""
        return await self._run(self._core.result(request_id, queue, timeout_s))

    async def score(
        self,
        queue: str,
        item: Item,
        timeout_s: float = 30.0,
        **call: Unpack[CallKeywords],
    ) -> Any:
        """See :meth:`gristmill.Client.score`."""
        return await self._run(self._core.score(queue, item, timeout_s, CallOptions(**call)))

    async def score_many(
        self, queue: str, items: Iterable[Item], **keywords: Unpack[StreamKeywords]
    ) -> list[Result]:
        """See :meth:`gristmill.Client.score_many`."""
        return [result async for _, result in self.stream(queue, items, ordered=True, **keywords)]

    def as_completed(
        self, queue: str, items: Iterable[Item], **keywords: Unpack[StreamKeywords]
    ) -> AsyncIterator[tuple[int, Result]]:
        """See :meth:`gristmill.Client.as_completed`."""
        return self.stream(queue, items, ordered=False, **keywords)

    async def stream(
        self,
        queue: str,
        items: Iterable[Item],
        *,
        ordered: bool = True,
        **keywords: Unpack[StreamKeywords],
    ) -> AsyncIterator[tuple[int, Result]]:
        """See :meth:`gristmill.Client.stream`; ``items`` is iterated in the event loop's thread."""
        stream = Stream(self._core, queue, items, ordered=ordered, **keywords)
        with closing(stream):
            while batch := await self._run(stream.step()):
                for pair in batch:
                    yield pair

    async def queues(self) -> list[str]:
        """See :meth:`gristmill.Client.queues`."""
        return await self._run(self._core.queues())

    async def depth(self, queue: str) -> Depth:
        """See :meth:`gristmill.Client.depth`."""
        return await self._run(self._core.depth(queue))

    async def workers(self, queue: str) -> list[dict[str, str]]:
        """See :meth:`gristmill.Client.workers`."""
        return await self._run(self._core.workers(queue))

    async def cancel(self, queue: str, *request_ids: str) -> dict[str, str]:
        """See :meth:`gristmill.Client.cancel`."""
        return await self._run(control.cancel(self._core, queue, request_ids))

    async def dead_letters(
        self, queue: str, ids: Iterable[str] | None = None, *, limit: int | None = None
    ) -> list[DeadLetter]:
        """See :meth:`gristmill.Client.dead_letters`."""
        return await self._run(control.dead_letters(self._core, queue, ids, limit))

    async def retry_dead(self, queue: str, ids: Iterable[str] | None) -> dict[str, str]:
        """See :meth:`gristmill.Client.retry_dead`."""
        return await self._run(control.retry_dead(self._core, queue, ids))

    async def purge_dead(
        self, queue: str, ids: Iterable[str] | None = None, *, older_than_s: float | None = None
    ) -> int:
        """See :meth:`gristmill.Client.purge_dead`."""
        return await self._run(control.purge_dead(self._core, queue, ids, older_than_s))

    async def pause(self, queue: str) -> None:
        """See :meth:`gristmill.Client.pause`."""
        await self._run(control.pause(self._core, queue, paused=True))

    async def resume(self, queue: str) -> None:
        """See :meth:`gristmill.Client.resume`."""
        await self._run(control.pause(self._core, queue, paused=False))

    async def set_limit(self, queue: str, max_length: int | None) -> None:
        """See :meth:`gristmill.Client.set_limit`."""
        await self._run(control.set_limit(self._core, queue, max_length))

    def _check_process(self) -> None:
        loop = asyncio.get_running_loop()
        if (fresh := self._made.forked()) is not None:
            self._made = fresh
            self._connect()
        elif self._loop not in {None, loop}:  # connections belong to the loop that made them
            self._connect()
        self._loop = loop

    async def _run(self, steps: Steps[T]) -> T:
        """Carry out what a core generator asks for."""
        self._check_process()
        try:
            op = next(steps)
            while True:
                try:
                    reply = await self._do(op)
                except ERRORS as error:
                    op = steps.throw(translate(error, self._url))
                else:
                    op = steps.send(reply)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            steps.close()  # a cancelled coroutine stops waiting for its result

    async def _do(self, op: Op) -> Any:
        match op:
            case Command(args):
                return await self._redis.call(*args)
            case Script(name, keys, args):
                return await self._redis.run(name, keys, args)
            case Read():
                return await self._read(op)
            case Sleep(seconds):
                return await asyncio.sleep(seconds)

    async def _read(self, op: Read) -> None:
        # No lock: on one event loop nothing comes between these lines, and a cancelled wait holds nothing.
        if op.mailbox.version != op.seen:
            return
        if (reading := self._reading.get(op.mailbox.queue)) is not None:  # another coroutine reads for all
            await asyncio.wait([reading], timeout=op.block_ms / 1000)
            return
        done = self._reading[op.mailbox.queue] = asyncio.get_running_loop().create_future()
        try:
            op.mailbox.feed(await self._redis.call(*op.mailbox.read_command(op.block_ms)))
        finally:
            del self._reading[op.mailbox.queue]
            done.set_result(None)
