"""A full queue refuses or is waited for, and drops nothing; deadlines that pass on the way."""

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest
from redis import Redis

from conftest import Server, Workers, wait_until
from gristmill import AsyncClient, Client, InvalidRequestError, QueueFull, Status, keys, wire
from gristmill.core import Depth
from gristmill.errors import ExitCode
from test_cli import gristmill


def test_producers_that_wait_for_a_full_queue_lose_and_double_nothing(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    own_client.set_limit(queue, 20)
    workers.start(tiny_classifier, url=own_redis.url)
    submitted: list[list[str]] = []
    deepest = 0

    def produce(number: int) -> None:
        ids = [f"p{number}-{i}" for i in range(300)]
        submitted.append(list(own_client.submit_many(queue, ["bread"] * 300, ids=ids, wait_s=120)))

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        depth = own_client.depth(queue)
        deepest = max(deepest, depth.waiting + depth.pending)
    for thread in threads:
        thread.join()
    assert deepest <= 20  # the bound held all the time
    assert sorted(len(ids) for ids in submitted) == [300] * 4
    assert all(own_client.result(request_id).ok for ids in submitted for request_id in ids)
    wait_until(lambda: own_client.depth(queue) == Depth(0, 0, 0, 20))
    wait_until(lambda: int(own_client.workers(queue)[0]["requests"]) == 1200)


def test_the_wait_for_a_full_queue_ends(own_client: Client, queue: str) -> None:
    own_client.set_limit(queue, 3)
    started = time.monotonic()
    with pytest.raises(QueueFull, match="gristmill queue limit") as caught:
        own_client.submit_many(queue, ["bread"] * 5, ids=list("abcde"), wait_s=0.5)
    assert time.monotonic() - started >= 0.5
    assert caught.value.accepted == ["a", "b", "c"]
    with pytest.raises(QueueFull):
        own_client.score(queue, "bread", wait_s=0.1)
    for wrong in (-1, float("nan"), "1"):
        with pytest.raises(InvalidRequestError, match="wait_s"):
            own_client.submit(queue, "bread", wait_s=wrong)  # type: ignore[arg-type]


def test_room_that_comes_is_taken(own_client: Client, queue: str) -> None:
    async def main() -> list[str]:
        async with AsyncClient(own_client._url) as client:
            waiting = asyncio.create_task(
                client.submit_many(queue, ["bread"] * 3, ids=list("abc"), wait_s=60)
            )
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await client.set_limit(queue, 3)
            return [str(request_id) for request_id in await waiting]

    own_client.set_limit(queue, 1)
    assert asyncio.run(main()) == ["a", "b", "c"]
    assert own_client.depth(queue).waiting == 3


def test_the_command_line_waits_for_room(own_client: Client, queue: str) -> None:
    own_client.set_limit(queue, 1)
    url = own_client._url
    full = gristmill("submit", queue, "-", "--wait", 0.2, stdin=b"a\nb\n", url=url)
    assert full.returncode == ExitCode.FAILURE
    assert len(full.stdout.split()) == 1
    widen = threading.Timer(1.0, own_client.set_limit, (queue, 5))
    widen.start()
    done = gristmill("submit", queue, "-", "--wait", 60, stdin=b"c\nd\n", url=url)
    assert done.returncode == ExitCode.OK
    assert own_client.depth(queue).waiting == 3
    widen.join()


def test_a_deadline_that_passes_inside_the_worker_is_expired_without_a_run(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    """The first window runs, the second is held; the process stands still until the second is late."""
    config = "batch: {max_items: 2000, shapes: [[1, 48]]}"
    process = workers.start(tiny_classifier, url=own_redis.url, config=config)
    first = own_client.submit_many(queue, [f"bread {i}" for i in range(2000)])
    wait_until(lambda: own_client.depth(queue).pending > 0)
    taken = own_client.depth(queue).pending
    late = own_client.submit_many(queue, [f"mill {i}" for i in range(50)], deadline_s=3)
    on_time = own_client.submit(queue, "mill", deadline_s=600)
    with Redis.from_url(own_redis.url, protocol=2) as redis:

        def held() -> bool:
            """Say whether all of them were given to the worker."""
            groups = redis.execute_command("XINFO GROUPS", keys.requests(queue))
            last = redis.execute_command("XREVRANGE", keys.requests(queue), "+", "-", "COUNT", 1)
            return bool(last) and groups[0]["last-delivered-id"] == last[0][0]

        wait_until(held)
        process.send_signal(signal.SIGSTOP)
        states = redis.mget([keys.result(queue, request_id) for request_id in late])
    open_still = [request_id for request_id, state in zip(late, states, strict=True) if state == wire.PENDING]
    time.sleep(3.1)
    process.send_signal(signal.SIGCONT)
    results = [own_client.result(request_id) for request_id in open_still]
    expired = [result for result in results if result.status == Status.EXPIRED]
    assert taken > 0
    assert expired  # they were in the worker when they became late
    assert len(results) - len(expired) <= 1  # it may have stopped in the midst of a batch of one
    assert all(result.batch is None and result.tokens is None for result in expired)  # none ran
    assert own_client.result(on_time).ok
    assert all(own_client.result(request_id).ok for request_id in first)
