"""The asyncio client: the same behaviour from one event loop."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis import Redis

from conftest import Server, Workers
from gristmill import AsyncClient, BrokerUnavailable, InvalidRequestError, QueueFull, ResultTimeout

TEXTS = ["the miller grinds the corn", "water turns the wheel", "bread", "a horse and a cart on the road"]


def use(url: str, body: Callable[[AsyncClient], Awaitable[None]], **options: int) -> None:
    async def main() -> None:
        async with AsyncClient(url, **options) as client:
            await body(client)

    asyncio.run(main())


def test_every_call_answers(redis_url: str, workers: Workers, queue: str, tiny_classifier: Path) -> None:
    workers.start(tiny_classifier)

    async def body(client: AsyncClient) -> None:
        request_id = await client.submit(queue, TEXTS[0])
        assert (await client.result(request_id)).ok
        ids = await client.submit_many(queue, TEXTS, ids=list("abcd"))
        assert [(await client.result(i)).id for i in ids] == list("abcd")
        assert await client.score(queue, TEXTS[1], options={"top_k": 1})
        results = await client.score_many(queue, [*TEXTS, ""])
        assert [result.ok for result in results] == [True] * 4 + [False]
        assert {i async for i, _ in client.as_completed(queue, TEXTS * 100, window=50)} == set(range(400))
        assert queue in await client.queues()
        assert (await client.depth(queue)).waiting == 0
        assert [worker["name"] for worker in await client.workers(queue)] == ["w0"]

    use(redis_url, body)


def test_a_forked_process_reads_a_reply_stream_of_its_own(
    redis_url: str, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    client = AsyncClient(redis_url)  # made before the fork, as by a server that loads its app first

    async def score() -> None:
        assert await client.score(queue, TEXTS[0])
        await client.close()

    children = []
    for _ in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                asyncio.run(score())
            finally:
                os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    asyncio.run(score())
    streams = {str(key).split("-")[-2] for key in redis.keys(f"*{queue}*:reply:*")}
    assert streams == {str(pid) for pid in [os.getpid(), *children]}


def test_hundreds_of_coroutines_wait_on_one_reply_stream(
    redis_url: str, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)

    async def body(client: AsyncClient) -> None:
        values = await asyncio.gather(*(client.score(queue, f"{TEXTS[i % 4]} {i}") for i in range(500)))
        assert len(values) == 500
        assert not client._core.mailbox(queue).awaited

    use(redis_url, body)


def test_a_cancelled_wait_harms_no_other(
    redis_url: str, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    async def body(client: AsyncClient) -> None:
        waits = [asyncio.create_task(client.score(queue, text)) for text in TEXTS * 3]
        await asyncio.sleep(0.3)
        for wait in waits[::2]:  # the one that reads for all is among them
            wait.cancel()
        await asyncio.to_thread(workers.start, tiny_classifier)
        assert all(await asyncio.gather(*waits[1::2]))
        assert not client._core.mailbox(queue).awaited

    use(redis_url, body)


def test_tasks_that_are_cancelled_again_and_again_block_nobody(
    redis_url: str, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    async def body(client: AsyncClient) -> None:
        for _ in range(20):
            waits = [asyncio.create_task(client.score(queue, text, 30)) for text in TEXTS]
            await asyncio.sleep(0.02)
            for _ in range(3):  # as frameworks do until a task has ended
                for wait in waits:
                    wait.cancel()
                await asyncio.sleep(0)
            await asyncio.wait(waits)
        await asyncio.to_thread(workers.start, tiny_classifier)
        assert await client.score(queue, TEXTS[0], 30)

    use(redis_url, body)


def test_a_client_may_be_used_from_one_event_loop_after_another(
    redis_url: str, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    client = AsyncClient(redis_url)
    for text in TEXTS:
        assert asyncio.run(_score_and_close(client, queue, text))


async def _score_and_close(client: AsyncClient, queue: str, text: str) -> bool:
    found = await client.score(queue, text)
    await client.close()
    return bool(found)


def test_errors_are_the_same(redis_url: str, queue: str) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(QueueFull):
            await client.submit_many(queue, TEXTS)
        with pytest.raises(ResultTimeout):
            await client.result("unknown", 0.1, queue=queue)
        with pytest.raises(InvalidRequestError):
            await client.submit(queue, "text", id="a b")

    use(redis_url, body, max_length=3)


def test_an_unavailable_redis_is_our_error(tmp_path: Path) -> None:
    async def body(client: AsyncClient) -> None:
        for call in (client.submit("q", "text"), client.score("q", "text"), client.score_many("q", ["text"])):
            with pytest.raises(BrokerUnavailable):
                await call

    use(f"unix://{tmp_path}/none.sock", body, retry_s=0)


def test_a_restart_of_redis_is_survived(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, url=own_redis.url)

    async def body(client: AsyncClient) -> None:
        stream = client.stream(queue, (f"{TEXTS[i % 4]} {i}" for i in range(2000)), window=200)
        seen = [(await anext(stream))[0] for _ in range(300)]
        await asyncio.to_thread(own_redis.stop)
        await asyncio.to_thread(own_redis.start)
        seen += [index async for index, result in stream if result.ok]
        assert seen == list(range(2000))

    use(own_redis.url, body)
