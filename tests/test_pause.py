"""Pausing a queue, and its bound."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from conftest import Server, Workers, wait_until
from gristmill import AsyncClient, Client, InvalidRequestError, QueueFull
from gristmill.core import Depth
from gristmill.errors import ExitCode
from test_cli import gristmill

EFFECT_S = 2.0  # WIRE.md


def test_a_paused_queue_accepts_and_runs_nothing_until_it_is_resumed(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    process = workers.start(tiny_classifier, url=own_redis.url)
    assert own_client.score(queue, "bread")
    own_client.pause(queue)
    time.sleep(EFFECT_S)  # from now on nothing is taken
    ids = own_client.submit_many(queue, ["bread"] * 10)
    ids += [own_client.submit(queue, "bread", priority="high")]
    time.sleep(1)
    depth = own_client.depth(queue)
    assert depth == Depth(waiting=11, pending=0, dead=0, max_length=100_000, paused=True)
    assert depth.oldest_s is not None
    assert 0.9 < depth.oldest_s < 60
    workers.start(tiny_classifier, url=own_redis.url)  # a worker that comes while it is paused takes nothing
    time.sleep(1)
    assert own_client.depth(queue).waiting == 11
    started = time.monotonic()
    own_client.resume(queue)
    assert all(own_client.result(request_id).ok for request_id in ids)
    assert time.monotonic() - started < 30
    assert process.poll() is None


def test_what_was_taken_before_a_pause_is_finished(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    config = "batch: {max_items: 100, shapes: [[1, 48]]}"
    ids = own_client.submit_many(queue, [f"bread {i}" for i in range(5000)])
    process = workers.start(tiny_classifier, url=own_redis.url, config=config)
    wait_until(lambda: own_client.depth(queue).waiting < 5000)
    own_client.pause(queue)
    wait_until(lambda: own_client.depth(queue).pending == 0)
    left = own_client.depth(queue).waiting
    time.sleep(1)
    assert own_client.depth(queue) == Depth(waiting=left, pending=0, dead=0, max_length=100_000, paused=True)
    assert left > 0  # it stopped in the midst of a backlog
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK  # a paused worker drains like any other
    workers.start(tiny_classifier, url=own_redis.url, config=config)
    own_client.resume(queue)
    assert all(own_client.result(request_id, 120).ok for request_id in ids)


def test_the_bound_is_set_for_all_clients(own_client: Client, queue: str) -> None:
    own_client.set_limit(queue, 2)
    own_client.submit_many(queue, ["bread"] * 2)
    with pytest.raises(QueueFull):
        own_client.submit(queue, "bread")
    assert own_client.depth(queue).max_length == 2
    own_client.set_limit(queue, None)
    assert own_client.depth(queue).max_length == 100_000
    for wrong in (-1, 1.5, True, "5"):
        with pytest.raises(InvalidRequestError, match="bound"):
            own_client.set_limit(queue, wrong)  # type: ignore[arg-type]


def test_the_asyncio_client_pauses_resumes_and_bounds(own_client: Client, queue: str) -> None:
    async def main() -> list[Depth]:
        async with AsyncClient(own_client._url) as client:
            await client.pause(queue)
            await client.set_limit(queue, 7)
            paused = await client.depth(queue)
            await client.resume(queue)
            return [paused, await client.depth(queue)]

    paused, resumed = asyncio.run(main())
    assert (paused.paused, paused.max_length) == (True, 7)
    assert not resumed.paused


def test_the_command_line_pauses_resumes_bounds_and_shows(own_client: Client, queue: str) -> None:
    url = own_client._url
    paused = gristmill("queue", "pause", queue, url=url)
    assert paused.returncode == ExitCode.OK
    assert b"no request or worker was ever seen" in paused.stderr  # it may be a mistyped name
    own_client.submit(queue, "bread")
    assert b"7 requests" in gristmill("queue", "limit", queue, 7, url=url).stderr
    shown = gristmill("queue", "show", queue, url=url, env={"COLUMNS": "200"}).stdout.decode()
    assert "paused" in shown
    (record,) = json.loads(gristmill("queue", queue, "--json", url=url).stdout)
    assert (record["paused"], record["max_length"], record["waiting"]) == (True, 7, 1)
    assert record["oldest_s"] >= 0
    resumed = gristmill("queue", "resume", queue, url=url)
    assert b"note" not in resumed.stderr
    gristmill("queue", "limit", queue, "--unset", url=url)
    assert own_client.depth(queue) == Depth(waiting=1, pending=0, dead=0, max_length=100_000)
    assert gristmill("queue", "limit", queue, url=url).returncode == ExitCode.USAGE
    assert gristmill("queue", "limit", queue, -1, url=url).returncode == ExitCode.USAGE
