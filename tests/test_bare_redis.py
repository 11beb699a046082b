"""The wire contract from outside: bare Redis commands in place of this project's producer."""

import json
import time
from pathlib import Path
from typing import Any

from redis import Redis

from conftest import Workers
from gristmill import Result, keys
from gristmill_worker.sources.base import Delivery, Outcome
from gristmill_worker.sources.streams import StreamSource


def poll(redis: Redis, key: str) -> Any:
    """GET until the result is there."""
    ends = time.monotonic() + 60
    while (value := redis.get(key)) in (None, b"pending"):
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert isinstance(value, bytes)
    return json.loads(value)


def test_xadd_then_get_is_all_that_a_producer_needs(
    redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    body = json.dumps({"text": "the miller grinds the corn", "options": {"top_k": 2}})
    redis.execute_command("XADD", f"gm:{{{queue}}}:requests", "*", "id", "r-1", "body", body)
    result = poll(redis, f"gm:{{{queue}}}:result:r-1")
    assert result["id"] == "r-1"
    assert result["status"] == "ok"
    assert result["error"] is None
    assert [set(entry) for entry in result["value"]] == [{"label", "score"}] * 2
    assert result["value"][0]["score"] >= result["value"][1]["score"]
    assert result["worker"] == "w0"
    assert result["model"].count("@") == 1
    assert set(result["timing_ms"]) == {"queued", "encode", "run"}
    assert result["batch"]["size"] == 1
    assert len(result["batch"]["shape"]) == 2
    assert result["tokens"] == 7
    assert 0 < redis.ttl(f"gm:{{{queue}}}:result:r-1") <= 3600
    assert redis.xlen(f"gm:{{{queue}}}:requests") == 0
    assert redis.xpending(f"gm:{{{queue}}}:requests", "workers")["pending"] == 0
    assert redis.sismember("gm:queues", queue)


def test_a_worker_pushes_to_a_reply_stream_that_its_reader_made(
    redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    requests, reply = f"gm:{{{queue}}}:requests", f"gm:{{{queue}}}:reply:me"
    add = ("XADD", requests, "*", "body", '{"text": "grain"}', "reply", "me")
    redis.execute_command(*add, "id", "before")
    poll(redis, f"gm:{{{queue}}}:result:before")
    assert not redis.exists(reply)  # nobody reads, nothing is kept
    redis.execute_command("XADD", reply, "*", "open", "1")
    redis.execute_command(*add, "id", "after", "ttl", "0")
    ends = time.monotonic() + 60
    while redis.xlen(reply) < 2:
        assert time.monotonic() < ends
        time.sleep(0.01)
    (_, fields) = redis.execute_command("XRANGE", reply, "-", "+")[1]
    (result,) = json.loads(fields[b"results"])
    assert (result["id"], result["status"]) == ("after", "ok")
    assert redis.get(f"gm:{{{queue}}}:result:after") == b"done"  # ttl 0: pushed, not kept


def test_of_a_batch_only_what_was_not_answered_elsewhere_is_stored_and_pushed(
    redis: Redis, redis_url: str, queue: str
) -> None:
    source = StreamSource(redis_url, queue, "w0", lease_s=30.0, result_ttl_s=60)
    for name in ("me", "you"):
        redis.xadd(keys.reply(queue, name), {"open": "1"})
    ttl = {"b": 0, "d": 0}
    reply = {"a": "me", "b": "me", "c": "me", "d": "you", "e": "you"}
    for request_id in "abcdef":
        redis.xadd(keys.requests(queue), {"id": request_id, "body": "{}"})
    deliveries: list[Delivery] = []
    while len(deliveries) < 6:
        deliveries += source.take(6, 0.1)
    redis.xack(keys.requests(queue), keys.GROUP, deliveries[1].entry_id)  # b: another worker was first
    redis.set(keys.result(queue, "e"), "answered")
    outcomes = [
        Outcome(delivery, Result(id_, "ok", value="ü" * i), reply.get(id_), ttl.get(id_))
        for i, (id_, delivery) in enumerate(zip("abcdef", deliveries, strict=True))
    ]
    assert source.finish(outcomes) == 4
    assert source.finish(outcomes) == 0
    source.leave()
    pushed = {}
    for name in ("me", "you"):
        ((_, fields),) = redis.execute_command("XRANGE", keys.reply(queue, name), "-", "+")[1:]
        pushed[name] = [(entry["id"], entry["value"]) for entry in json.loads(fields[b"results"])]
    assert pushed == {"me": [("a", ""), ("c", "üü")], "you": [("d", "üüü")]}
    stored: list[Any] = [redis.get(keys.result(queue, request_id)) for request_id in "abcdef"]
    assert [json.loads(stored[i])["value"] for i in (0, 2, 5)] == ["", "üü", "üüüüü"]
    assert [stored[i] for i in (1, 3, 4)] == [None, b"done", b"answered"]


def test_an_entry_that_nobody_can_be_told_about_is_a_dead_letter(
    redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    redis.execute_command("XADD", f"gm:{{{queue}}}:requests", "*", "colour", "blue")
    ends = time.monotonic() + 60
    while not (letters := redis.execute_command("XRANGE", f"gm:{{{queue}}}:dead", "-", "+")):
        assert time.monotonic() < ends
        time.sleep(0.01)
    ((_, letter),) = letters
    assert letter[b"colour"] == b"blue"
    assert b"no field 'id'" in letter[b"reason"]
    assert letter[b"worker"] == b"w0"
    assert letter[b"deliveries"] == b"1"
    assert redis.xlen(f"gm:{{{queue}}}:requests") == 0


def test_a_worker_tells_who_it_is(redis: Redis, workers: Workers, queue: str, tiny_classifier: Path) -> None:
    process = workers.start(tiny_classifier)
    beat = redis.execute_command("HGETALL", f"gm:{{{queue}}}:worker:w0")
    assert beat[b"pid"] == b"%d" % process.pid
    assert beat[b"task"] == b"text-classification"
    assert beat[b"engine"] == b"openvino"
    assert 0 < redis.ttl(f"gm:{{{queue}}}:worker:w0") <= 10
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert not redis.exists(f"gm:{{{queue}}}:worker:w0")
