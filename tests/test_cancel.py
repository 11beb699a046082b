"""Cancelling: what waits is never run, who waits is told, and what is too late is said."""

import asyncio
import json
import signal
import threading
import time
from pathlib import Path

import pytest
from redis import Redis

from conftest import Server, Workers, wait_until
from gristmill import (
    AsyncClient,
    Client,
    InvalidRequestError,
    RequestCancelled,
    Result,
    Status,
    keys,
    wire,
)
from gristmill.core import Depth
from gristmill.errors import ExitCode
from gristmill_worker.sources.base import Outcome
from gristmill_worker.sources.streams import StreamSource
from test_cli import gristmill

EMPTY = Depth(waiting=0, pending=0, dead=0, max_length=100_000)


def requests_of(process_log: Path) -> dict[str, int]:
    stopped: dict[str, int] = json.loads(process_log.read_text().splitlines()[-1])
    return stopped


def test_a_cancelled_request_never_runs_and_leaves_nothing_behind(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    ids = [own_client.submit(queue, f"bread {i}", priority=keys.PRIORITIES[i % 3]) for i in range(9)]
    assert own_client.cancel(queue, *ids[:6]) == dict.fromkeys(ids[:6], "cancelled")
    assert own_client.cancel(queue, ids[0]) == {ids[0]: "cancelled"}  # repeated
    result = own_client.result(ids[0])
    assert (result.status, result.error) == (Status.CANCELLED, ("cancelled", "it was cancelled"))
    process = workers.start(tiny_classifier, url=own_redis.url)
    assert all(own_client.result(request_id).ok for request_id in ids[6:])
    wait_until(lambda: own_client.depth(queue) == EMPTY)
    with Redis.from_url(own_redis.url) as redis:
        wait_until(lambda: not redis.exists(keys.cancelled(queue)))  # nobody has to look for them any more
    process.terminate()
    process.wait(timeout=60)
    counters = requests_of(workers.log())
    assert (counters["requests"], counters["dropped"]) == (3, 6)
    assert counters["tokens"] < 3 * 10  # the engine saw three
    with pytest.raises(RequestCancelled):
        own_client.result(ids[5]).unwrap()


def test_what_is_final_is_too_late_and_what_is_not_known_is_said_to_be_so(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, url=own_redis.url)
    good, empty = own_client.submit(queue, "bread"), own_client.submit(queue, "")
    before = own_client.result(good), own_client.result(empty)
    with Redis.from_url(own_redis.url) as redis:
        redis.set(keys.result(queue, "pushed"), wire.DONE)
        redis.lpush(keys.result(queue, "foreign"), "x")
        redis.set(keys.result(queue, "odd"), "?")
        found = own_client.cancel(queue, good, empty, "pushed", "nobody", "foreign", "odd")
        assert not redis.exists(keys.cancelled(queue))
    expected = {"pushed": "done", "nobody": "unknown", "foreign": "unknown", "odd": "unknown"}
    assert found == {good: "ok", empty: "error"} | expected
    assert (own_client.result(good), own_client.result(empty)) == before
    assert own_client.cancel(queue) == {}
    with pytest.raises(InvalidRequestError):
        own_client.cancel(queue, "a b")


def test_who_waits_is_told_at_once_by_the_push(own_client: Client, queue: str) -> None:
    request_id = own_client.submit(queue, "bread")
    told: list[tuple[Result, float]] = []

    def wait() -> None:
        result = own_client.result(request_id, 60)
        told.append((result, time.monotonic()))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    cancelled_at = time.monotonic()
    assert own_client.cancel(queue, request_id) == {request_id: "cancelled"}
    waiting.join(timeout=60)
    ((result, at),) = told
    assert result.status == Status.CANCELLED
    assert at - cancelled_at < 10


@pytest.mark.parametrize("ordered", [True, False])
def test_a_stream_whose_request_was_cancelled_by_others_goes_on(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path, ordered: bool
) -> None:
    """Requests of a stream are pushed only (ttl 0); a foreign canceller does not know where to."""
    results: dict[int, Result] = {}
    stream = own_client.stream(queue, ["bread"] * 30, ordered=ordered)
    reader = threading.Thread(target=lambda: results.update(stream))
    reader.start()
    with Client(own_redis.url) as other, Redis.from_url(own_redis.url) as redis:
        wait_until(lambda: redis.xlen(keys.requests(queue)) == 30)
        entries = redis.execute_command("XRANGE", keys.requests(queue), "-", "+", "COUNT", 10)
        victims = [fields[b"id"].decode() for _, fields in entries]
        assert set(other.cancel(queue, *victims).values()) == {"cancelled"}
    workers.start(tiny_classifier, url=own_redis.url)
    reader.join(timeout=60)
    assert sorted(results) == list(range(30))
    assert [results[i].status for i in range(30)] == ["cancelled"] * 10 + ["ok"] * 20


def test_a_late_answer_of_what_ran_is_dropped(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    config = "batch: {shapes: [[1, 48]]}"
    process = workers.start(tiny_classifier, url=own_redis.url, config=config)
    ids = own_client.submit_many(queue, [f"bread {i}" for i in range(3000)])
    wait_until(lambda: own_client.depth(queue).pending > 0)
    process.send_signal(signal.SIGSTOP)  # in the midst of its windows
    outcome = own_client.cancel(queue, *ids)
    process.send_signal(signal.SIGCONT)
    results = {request_id: own_client.result(request_id) for request_id in ids}
    wait_until(lambda: own_client.depth(queue) == EMPTY)
    assert {request_id: result.status for request_id, result in results.items()} == outcome
    assert set(outcome.values()) <= {"ok", "cancelled"}
    with Redis.from_url(own_redis.url) as redis:
        wait_until(lambda: not redis.exists(keys.cancelled(queue)))


def test_an_entry_of_a_dead_worker_is_skipped_too(own_client: Client, own_redis: Server, queue: str) -> None:
    dead = StreamSource(own_redis.url, queue, "dead", lease_s=1.0, result_ttl_s=60)
    heir = StreamSource(own_redis.url, queue, "heir", lease_s=1.0, result_ttl_s=60)
    own_client.submit(queue, "bread", id="a")
    (held,) = dead.take(5, 0.1)
    own_client.cancel(queue, "a")
    assert not held.cancelled
    taken = heir.take(5, 0.05)
    while not taken:
        taken = heir.take(5, 0.05)
    assert taken[0].cancelled
    # Its result may be gone by now: then the worker stores it anew.
    with Redis.from_url(own_redis.url) as redis:
        redis.delete(keys.result(queue, "a"))
    assert heir.finish([Outcome(taken[0], Result("a", Status.CANCELLED, error=("cancelled", "late")))]) == 1
    assert dead.finish([Outcome(held, Result("a", "ok", value=1))]) == 0
    assert own_client.result("a", queue=queue).status == Status.CANCELLED
    heir.leave()
    dead.leave()


def test_the_set_of_cancelled_ids_is_bounded(
    own_client: Client, own_redis: Server, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.control.CANCELLED_IDS", 5)
    ids = own_client.submit_many(queue, ["bread"] * 20)
    for request_id in ids:
        own_client.cancel(queue, request_id)
    name = keys.cancelled(queue)
    with Redis.from_url(own_redis.url) as redis:
        assert redis.zcard(name) == 5
        assert 0 < redis.ttl(name) <= 7 * 24 * 3600
        redis.zadd(name, {"old": time.time() * 1000 - 8 * 24 * 3600 * 1000})
        own_client.submit(queue, "bread", id="last")
        own_client.cancel(queue, "last")
        assert redis.zscore(name, "old") is None


def test_the_asyncio_client_cancels(own_client: Client, queue: str) -> None:
    async def main() -> tuple[Result, dict[str, str]]:
        async with AsyncClient(own_client._url) as client:
            request_id = await client.submit(queue, "bread", ttl_s=0)
            waiting = asyncio.create_task(client.result(request_id, 60))
            await asyncio.sleep(0.2)
            outcome = await client.cancel(queue, request_id, "nobody")
            return await waiting, outcome

    result, outcome = asyncio.run(main())
    assert result.status == Status.CANCELLED
    assert outcome == {result.id: "cancelled", "nobody": "unknown"}


def test_the_command_line_cancels(own_client: Client, queue: str) -> None:
    own_client.submit(queue, "bread", id="a")
    done = gristmill("cancel", queue, "a", url=own_client._url)
    assert (done.returncode, done.stdout) == (ExitCode.OK, b"a\tcancelled\n")
    late = gristmill("cancel", queue, "a", "b", url=own_client._url)
    assert (late.returncode, late.stdout) == (ExitCode.FAILURE, b"a\tcancelled\nb\tunknown\n")
    shown = gristmill("result", queue, "a", url=own_client._url)
    assert shown.returncode == ExitCode.REQUEST_FAILED
    assert json.loads(shown.stdout)["status"] == "cancelled"
