"""A Redis that answers, but not as wanted: what is refused is waited for, and nothing is lost."""

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from conftest import Server, Workers, wait_until
from gristmill import Client, Result, keys
from gristmill.driver import translate

TEXTS = [f"the miller grinds the corn {i}" for i in range(300)]


class Waiting:
    """Scores a few texts in a thread, as a program does while something is wrong with Redis."""

    def __init__(self, url: str, queue: str) -> None:
        self._url = url
        self._queue = queue
        self.results: list[Result] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with Client(self._url, retry_s=60) as client:
            self.results = client.score_many(self._queue, TEXTS[:50])

    def all_ok(self) -> bool:
        self._thread.join(60)
        return [result.ok for result in self.results] == [True] * 50


def _set(redis: Redis, name: str, value: int) -> None:
    redis.config_set(name, value)


def refuse_writes_as_a_replica(redis: Redis, _: Server) -> Callable[[], None]:
    redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    return lambda: redis.execute_command("REPLICAOF", "NO", "ONE")


def refuse_writes_after_a_failed_save(redis: Redis, server: Server) -> Callable[[], None]:
    in_the_way = server.folder / "dump.rdb"
    in_the_way.mkdir()
    redis.config_set("save", "3600 1000000")

    def save(status: str) -> None:
        redis.execute_command("BGSAVE")
        wait_until(lambda: not redis.info("persistence")["rdb_bgsave_in_progress"])
        assert redis.info("persistence")["rdb_last_bgsave_status"] == status

    save("err")

    def mend() -> None:
        in_the_way.rmdir()
        save("ok")

    return mend


def refuse_writes_without_replicas(redis: Redis, _: Server) -> Callable[[], None]:
    redis.config_set("min-replicas-to-write", 1)
    return lambda: _set(redis, "min-replicas-to-write", 0)


@pytest.mark.parametrize(
    ("refuse", "code"),
    [
        (refuse_writes_as_a_replica, "read only replica"),
        (refuse_writes_after_a_failed_save, "MISCONF"),
        (refuse_writes_without_replicas, "NOREPLICAS"),
    ],
)
def test_a_redis_that_refuses_writes_is_waited_for(
    own_redis: Server,
    workers: Workers,
    queue: str,
    tiny_classifier: Path,
    refuse: Callable[[Redis, Server], Callable[[], None]],
    code: str,
) -> None:
    process = workers.start(tiny_classifier, url=own_redis.url)
    with Client(own_redis.url) as client, Redis.from_url(own_redis.url, protocol=2) as redis:
        ids = client.submit_many(queue, TEXTS)
        mend = refuse(redis, own_redis)
        wait_until(lambda: code in workers.log().read_text())
        waiting = Waiting(own_redis.url, queue)
        waiting._thread.join(1)
        assert not waiting.results
        mend()
        assert all(client.result(request_id).ok for request_id in ids)
        assert waiting.all_ok()
        wait_until(lambda: redis.xlen(keys.requests(queue)) == 0)
    assert process.poll() is None
    assert "Traceback" not in workers.log().read_text()
    assert '"window_failed"' not in workers.log().read_text()


def test_a_full_memory_refuses_new_requests_and_still_answers_the_old(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    with Client(own_redis.url, retry_s=60) as client, Redis.from_url(own_redis.url) as redis:
        worker = workers.start(tiny_classifier, url=own_redis.url)
        worker.terminate()  # the group is there
        worker.wait()
        ids = [*client.submit_many(queue, TEXTS, reply=False), *client.submit_many(queue, TEXTS)]
        redis.config_set("maxmemory", 1)
        workers.start(tiny_classifier, url=own_redis.url, ready=False)
        waiting = Waiting(own_redis.url, queue)
        waiting._thread.join(0.5)
        mended = threading.Timer(30, redis.config_set, ("maxmemory", 0))
        mended.start()
        answered = [client.result(request_id, 60).ok for request_id in ids]
        assert mended.is_alive()  # memory was full all the time
        mended.cancel()
        assert all(answered)
        assert not waiting.results
        redis.config_set("maxmemory", 0)
        assert waiting.all_ok()


def test_a_redis_that_loads_its_data_is_waited_for(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, url=own_redis.url)
    with Client(own_redis.url, retry_s=60) as client, Redis.from_url(own_redis.url) as redis:
        redis.mset({f"filler-{i}": os.urandom(10_000) for i in range(2000)})
        redis.execute_command("BGREWRITEAOF")
        wait_until(lambda: redis.info("persistence")["aof_last_bgrewrite_status"] == "ok")
        wait_until(lambda: not redis.info("persistence")["aof_rewrite_in_progress"])
        ids = client.submit_many(queue, TEXTS)
        own_redis.stop()
        # One millisecond for each key.
        own_redis.start(ready=False, key_load_delay="1000")
        waiting = Waiting(own_redis.url, queue)
        wait_until(lambda: "loading the dataset" in workers.log().read_text())
        assert not waiting.results
        assert all(client.result(request_id, 60).ok for request_id in ids)
        assert waiting.all_ok()


def test_a_redis_that_may_lose_requests_is_warned_about(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, url=own_redis.url)
    with Redis.from_url(own_redis.url) as redis:
        asked = itertools.count()  # INFO by this test, which the server counts as well
        wait_until(lambda: redis.info("commandstats")["cmdstat_info"]["calls"] >= next(asked) + 2)
        redis.config_set("maxmemory-policy", "allkeys-lru")
        redis.config_set("appendonly", "no")
    workers.start(tiny_classifier, url=own_redis.url)
    wait_until(lambda: "redis_keeps_nothing" in workers.log(1).read_text())
    assert "maxmemory-policy noeviction" in workers.log(1).read_text()
    assert not any(word in workers.log(0).read_text() for word in ("redis_may_evict", "redis_keeps_nothing"))


@pytest.mark.parametrize(
    "message",
    [
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    ],
)
def test_what_passes_by_itself_is_waited_for(message: str) -> None:
    assert translate(Exception(message), "redis://localhost").retryable
    assert not translate(Exception("BUSYGROUP Consumer Group name already exists"), "redis://x").retryable
