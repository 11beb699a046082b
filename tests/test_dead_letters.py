"""Dead letters: list, show, retry, delete; each on both servers."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from redis import Redis

from conftest import Server, Workers
from gristmill import AsyncClient, Client, DeadLetter, InvalidRequestError, Result, keys, wire
from gristmill.core import Depth
from gristmill.errors import ErrorCode, ExitCode
from gristmill_worker.sources.base import Outcome
from gristmill_worker.sources.streams import StreamSource
from test_cli import gristmill


def bury(client: Client, queue: str) -> None:
    """Have everything that waits on ``queue`` given up, as a worker does it."""
    source = StreamSource(client._url, queue, "undertaker", lease_s=30.0, result_ttl_s=60)
    while found := source.take(100, 0.0):
        outcomes = []
        for delivery in found:
            delivery.deliveries = 4
            request = wire.decode_request(delivery.fields)
            result = None
            if request.id is not None:
                error = (ErrorCode.DEAD_LETTERED, "given up")
                result = Result(request.id, "error", error=error)
            outcomes.append(Outcome(delivery, result, request.reply, request.ttl_s, "max_deliveries"))
        assert source.finish(outcomes) == len(found)
    source.leave()


def test_dead_letters_are_listed_with_what_they_asked(own_client: Client, queue: str) -> None:
    started_ms = time.time() * 1000
    own_client.submit_many(queue, [f"text {i}" for i in range(120)], ids=[f"r-{i}" for i in range(120)])
    bury(own_client, queue)
    letters = own_client.dead_letters(queue)
    assert [letter.id for letter in letters] == [f"r-{i}" for i in range(120)]
    first = letters[0]
    assert (first.reason, first.deliveries, first.worker) == ("max_deliveries", 4, "undertaker")
    assert json.loads(first.body) == {"text": "text 0"}
    assert abs(first.died_ms - started_ms) < 60_000
    assert own_client.dead_letters(queue, limit=3) == letters[:3]
    assert own_client.dead_letters(queue, ["r-7", letters[100].letter]) == [letters[7], letters[100]]
    assert own_client.dead_letters(queue, "r-7") == [letters[7]]
    assert own_client.dead_letters(queue, ["no such"]) == []
    with pytest.raises(InvalidRequestError, match="limit"):
        own_client.dead_letters(queue, limit=-1)


def test_a_retried_letter_is_a_fresh_request_with_a_result_of_its_own(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    own_client.submit(queue, "bread", id="late", deadline_s=0.001)
    own_client.submit(queue, "bread", id="kept", ttl_s=50)
    own_client.submit(queue, "bread", id="pushed", ttl_s=0)
    bury(own_client, queue)
    with pytest.raises(Exception, match="dead_lettered"):
        own_client.result("kept", queue=queue).unwrap()
    assert own_client.retry_dead(queue, ["kept"]) == {"kept": "queued"}
    with Redis.from_url(own_redis.url) as redis:
        assert redis.get(keys.result(queue, "kept")) == b"pending"
    assert own_client.retry_dead(queue, ["kept"]) == {"kept": "gone"}  # repeated, it is queued no second time
    assert own_client.retry_dead(queue, None) == {"late": "queued", "pushed": "queued"}
    assert own_client.depth(queue) == Depth(waiting=3, pending=0, dead=0, max_length=100_000)
    workers.start(tiny_classifier, url=own_redis.url)
    for request_id in ("late", "kept", "pushed"):
        assert own_client.result(request_id, queue=queue).ok
    with Redis.from_url(own_redis.url) as redis:
        assert 0 < redis.ttl(keys.result(queue, "kept")) <= 50


def test_what_cannot_be_queued_again_keeps_its_letter(
    own_client: Client, own_redis: Server, queue: str
) -> None:
    own_client.submit_many(queue, ["bread"] * 4, ids=["a", "b", "c", "d"])
    bury(own_client, queue)
    with Redis.from_url(own_redis.url) as redis:
        redis.execute_command("XADD", keys.requests(queue), "*", "colour", "blue")
        bury(own_client, queue)
        redis.set(keys.result(queue, "a"), wire.encode_result(Result("a", "ok", value=1)))
        redis.set(keys.result(queue, "b"), wire.PENDING)
    own_client.set_limit(queue, 1)
    outcome = own_client.retry_dead(queue, None)
    (unusable,) = [name for name, what in outcome.items() if what == "unusable"]
    assert outcome == {"a": "answered", "b": "answered", "c": "queued", "d": "full", unusable: "unusable"}
    assert [letter.id for letter in own_client.dead_letters(queue)] == ["a", "b", "d", None]
    assert own_client.depth(queue) == Depth(waiting=1, pending=0, dead=4, max_length=1)
    assert own_client.purge_dead(queue, [unusable]) == 1


def test_letters_are_deleted_by_id_by_age_or_all(own_client: Client, queue: str) -> None:
    assert own_client.purge_dead(queue) == 0
    own_client.submit_many(queue, ["bread"] * 5, ids=list("abcde"))
    bury(own_client, queue)
    assert own_client.purge_dead(queue, ["a", "nobody"]) == 1
    assert own_client.purge_dead(queue, older_than_s=60) == 0
    assert own_client.purge_dead(queue, older_than_s=float("inf")) == 0
    time.sleep(2)
    own_client.submit(queue, "bread", id="f")
    bury(own_client, queue)
    assert own_client.purge_dead(queue, older_than_s=2) == 4
    assert [letter.id for letter in own_client.dead_letters(queue)] == ["f"]
    assert own_client.purge_dead(queue) == 1
    with pytest.raises(InvalidRequestError, match="either"):
        own_client.purge_dead(queue, ["a"], older_than_s=1)


def test_an_age_of_nothing_deletes_what_died_in_this_millisecond(
    own_client: Client, own_redis: Server, queue: str
) -> None:
    with Redis.from_url(own_redis.url) as redis:
        for _ in range(100):
            redis.xadd(keys.dead(queue), {"reason": "max_deliveries"})
            assert own_client.purge_dead(queue, older_than_s=0) == 1


def test_what_a_foreign_hand_writes_among_the_letters_is_shown_as_it_is(
    own_client: Client, own_redis: Server, queue: str
) -> None:
    with Redis.from_url(own_redis.url) as redis:
        redis.xadd(keys.dead(queue), {"id": "x y", "reason": b"\xff"})
        redis.xadd(keys.dead(queue), {"reason": "r", "deliveries": "many", "priority": "low", "id": "ok"})
    odd, low = own_client.dead_letters(queue)
    assert (odd.id, odd.reason, odd.body) == (None, "", b"")
    assert (low.id, low.deliveries, low.priority) == ("ok", 0, "low")


def test_the_asyncio_client_does_the_same(own_client: Client, queue: str) -> None:
    async def main() -> tuple[list[DeadLetter], dict[str, str], int]:
        async with AsyncClient(own_client._url) as client:
            return (
                await client.dead_letters(queue, limit=5),
                await client.retry_dead(queue, ["a"]),
                await client.purge_dead(queue),
            )

    own_client.submit_many(queue, ["bread"] * 2, ids=["a", "b"])
    bury(own_client, queue)
    letters, outcome, purged = asyncio.run(main())
    assert [letter.id for letter in letters] == ["a", "b"]
    assert (outcome, purged) == ({"a": "queued"}, 1)


def test_the_command_line_lists_shows_retries_and_deletes(own_client: Client, queue: str) -> None:
    url = own_client._url
    own_client.submit_many(queue, ["bread"] * 4, ids=["a", "b", "c", "d"])
    bury(own_client, queue)
    listed = gristmill("dead", "ls", queue, url=url, env={"COLUMNS": "200"}).stdout.decode()
    assert "max_deliveries" in listed
    assert "undertaker" in listed
    lines = gristmill("dead", "ls", queue, "--json", "--limit", 2, url=url).stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b"]
    shown = json.loads(gristmill("dead", "show", queue, "b", url=url).stdout)
    assert json.loads(shown["fields"]["body"]) == {"text": "bread"}
    missing = gristmill("dead", "show", queue, "z", url=url)
    assert missing.returncode == ExitCode.FAILURE
    assert b"gristmill dead ls" in missing.stderr
    retried = gristmill("dead", "retry", queue, "a", "z", url=url)
    assert retried.returncode == ExitCode.FAILURE
    assert set(retried.stdout.splitlines()) == {b"a\tqueued", b"z\tgone"}
    assert gristmill("dead", "retry", queue, url=url).returncode == ExitCode.USAGE
    assert gristmill("dead", "purge", queue, "--all", "b", url=url).returncode == ExitCode.USAGE
    assert gristmill("dead", "purge", queue, "b", "z", url=url).returncode == ExitCode.FAILURE
    assert gristmill("dead", "purge", queue, "--older-than", 60, url=url).stdout == b"0\n"
    assert gristmill("dead", "retry", queue, "--all", url=url).stdout.splitlines() == [
        b"c\tqueued",
        b"d\tqueued",
    ]
    assert gristmill("dead", "purge", queue, "--all", url=url).stdout == b"0\n"
