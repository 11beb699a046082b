"""Clients that submit and score steadily while servers fail, and an account of what became of it all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from gristmill import AsyncClient, Client, Result
from gristmill.errors import ResultTimeout

TEXTS: Final = ["the miller grinds the corn", "water turns the wheel", "bread", "a cart on the road"]
PAUSE_S: Final = 0.005


@dataclass
class Batch:
    """What one call of a client was given, and what Redis said about it."""

    queue: str
    ids: Sequence[str]
    began: float
    acknowledged: float
    replicated: bool = False


class Traffic:
    """For each queue a thread that submits and a coroutine that scores; a context manager.

    ``replicated`` is asked after each submit whether all that was acknowledged by now is on a replica too.
    """

    def __init__(self, url: str, queues: Sequence[str], replicated: Callable[[str], bool]) -> None:
        self.url = url
        self.queues = queues
        self.batches: list[Batch] = []
        self.scored: list[Result] = []
        self._replicated = replicated
        self._done = threading.Event()
        self._failures: list[BaseException] = []
        self._client = Client(url, retry_s=60)
        self._expected = self._values(self._client.score_many(queues[0], TEXTS))
        threads: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(self._score, ())]
        threads += [(self._submit, (queue,)) for queue in queues]
        self._threads = [threading.Thread(target=self._guard, args=each) for each in threads]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()
        self._client.close()
        if error is None and self._failures:
            raise self._failures[0]

    def wait_for(self, count: int, queue: str | None = None) -> None:
        """Return once ``count`` submits begun from now on were acknowledged, on each queue or on one."""
        now = time.monotonic()
        for each in self.queues if queue is None else [queue]:
            while sum(b.queue == each and b.began >= now for b in list(self.batches)) < count:
                if self._failures:
                    raise self._failures[0]
                time.sleep(0.01)

    def check(self, is_certain: Callable[[Batch], bool]) -> tuple[int, int]:
        """Check all results; returns how many submitted requests were certain to have one, and how many not.

        Of the others each has its right result or none: Redis had acknowledged them, and lost them.
        """
        certain = lost = 0
        with Client(self.url) as client:
            for batch in self.batches:
                sure = is_certain(batch)
                for i, request_id in enumerate(batch.ids):
                    try:
                        result = client.result(request_id, 60 if sure else 0, queue=batch.queue)
                    except ResultTimeout:
                        if sure:
                            raise
                        lost += 1
                        continue
                    certain += sure
                    self._check(result, i)
            for i, result in enumerate(self.scored):
                self._check(result, i % len(TEXTS))
            for queue in self.queues:
                depth = client.depth(queue)
                assert (depth.waiting, depth.pending, depth.dead) == (0, 0, 0)
        return certain, lost

    def _check(self, result: Result, text: int) -> None:
        assert self._values([result]) == [self._expected[text]]

    def _values(self, results: Sequence[Result]) -> list[tuple[str, float]]:
        for result in results:
            assert result.ok, result
        return [(result.value[0]["label"], round(result.value[0]["score"], 3)) for result in results]

    def _guard(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            target(*args)
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            self._failures.append(error)

    def _submit(self, queue: str) -> None:
        while not self._done.is_set():
            began = time.monotonic()
            ids = self._client.submit_many(queue, TEXTS, reply=False)
            batch = Batch(queue, ids, began, time.monotonic())
            batch.replicated = self._replicated(queue)
            self.batches.append(batch)
            time.sleep(PAUSE_S)

    def _score(self) -> None:
        asyncio.run(self._score_all())

    async def _score_all(self) -> None:
        async with AsyncClient(self.url, retry_s=60) as client, asyncio.TaskGroup() as group:
            for queue in self.queues:
                group.create_task(self._score_queue(client, queue))

    async def _score_queue(self, client: AsyncClient, queue: str) -> None:
        while not self._done.is_set():
            # A stream submits again what Redis has lost.
            self.scored += await client.score_many(queue, TEXTS)
            await asyncio.sleep(PAUSE_S)
