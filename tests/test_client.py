"""The blocking client against a real Redis and real workers."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
from redis import Redis

from conftest import Server, Workers, wait_until
from gristmill import (
    BrokerUnavailable,
    Client,
    InvalidRequestError,
    QueueFull,
    RequestExpired,
    RequestId,
    Result,
    ResultTimeout,
    ScoringError,
    calls,
    core,
    keys,
    wire,
)

TEXTS = ["the miller grinds the corn", "water turns the wheel", "bread", "a horse and a cart on the road"]


def test_the_same_id_five_times_runs_once(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    ids = {client.submit(queue, TEXTS[0], id="order-1") for _ in range(5)}
    assert ids == {"order-1"}
    assert client.depth(queue).waiting == 1
    process = workers.start(tiny_classifier)
    first = client.result("order-1", queue=queue)
    client.submit(queue, TEXTS[0], id="order-1")
    assert client.depth(queue).waiting == 0  # answered: not even a late repetition runs
    assert client.result("order-1", queue=queue) == first
    process.terminate()
    process.wait(timeout=60)
    stopped = json.loads(workers.log().read_text().splitlines()[-1])
    assert (stopped["event"], stopped["requests"], stopped["batches"]) == ("stopped", 1, 1)


def test_submit_and_result(client: Client, workers: Workers, queue: str, tiny_classifier: Path) -> None:
    workers.start(tiny_classifier)
    request_id = client.submit(queue, TEXTS[0])
    assert isinstance(request_id, RequestId)
    assert request_id.queue == queue
    result = client.result(request_id)
    assert result.ok
    assert result.id == request_id
    assert client.result(request_id) == result  # again, from its key
    with Client(client._url) as other:
        assert other.result(str(request_id), queue=queue) == result
        assert other.result(request_id) == result
    assert queue in client.queues()


def test_a_result_from_before_the_reply_stream_was_there_is_found(
    client: Client, workers: Workers, queue: str, redis: Redis, tiny_classifier: Path
) -> None:
    ids = client.submit_many(queue, TEXTS)
    assert not redis.exists(keys.reply(queue, client._core.name))
    workers.start(tiny_classifier)
    wait_until(lambda: client.depth(queue) == core.Depth(0, 0, 0, 100_000))
    assert [client.result(request_id).id for request_id in ids] == ids


def test_score_gives_the_value_or_raises(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    (best,) = client.score(queue, TEXTS[0])
    everything = client.score(queue, TEXTS[0], options={"top_k": None})
    assert len(everything) == 3
    assert everything[0] == best
    assert client.score(queue, (TEXTS[0], TEXTS[1])) != [best]
    with pytest.raises(ScoringError) as caught:
        client.score(queue, "  ")
    assert caught.value.code == "empty_input"


def test_score_many_keeps_the_order_and_a_bad_item_its_place(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    huge = "x " * 600_000
    items: list[calls.Item] = [
        TEXTS[0],
        "",
        "\ud800",
        {"text": 5},
        (TEXTS[1], TEXTS[2]),
        huge,
        TEXTS[3],
    ]
    results = client.score_many(queue, items)
    codes = [result.error and result.error[0] for result in results]
    assert codes == [None, "empty_input", "bad_request", "bad_request", None, "too_large", None]
    alone = client.score(queue, TEXTS[3])
    assert results[6].value[0]["label"] == alone[0]["label"]
    assert results[6].value[0]["score"] == pytest.approx(alone[0]["score"], abs=1e-5)


def test_as_completed_pulls_no_more_than_its_window(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    pulled = 0

    def items() -> Iterator[str]:
        nonlocal pulled
        for i in range(500):
            pulled += 1
            yield f"{TEXTS[i % 4]} {i % 7}"

    seen = set()
    for done, (index, result) in enumerate(client.as_completed(queue, items(), window=40), 1):
        assert result.ok
        assert pulled - done < 40
        seen.add(index)
    assert seen == set(range(500))


def test_a_stream_that_is_left_early_leaves_nothing_behind(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    stream = client.as_completed(queue, TEXTS * 50)
    assert len(list(islice(stream, 3))) == 3
    del stream
    assert not client._core.mailbox(queue).awaited
    assert client.score(queue, TEXTS[0])


def test_two_threads_and_two_queues_share_one_client(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    quiet = f"{queue}-quiet"
    waiting = threading.Thread(target=_expect_timeout, args=(client, quiet))
    waiting.start()
    answers: list[list[bool]] = []

    def score() -> None:
        answers.append([bool(client.score(queue, TEXTS[0])) for _ in range(20)])

    threads = [threading.Thread(target=score) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in [*threads, waiting]:
        thread.join(timeout=60)
    assert answers == [[True] * 20] * 8


def _expect_timeout(client: Client, queue: str) -> None:
    with pytest.raises(ResultTimeout):
        client.score(queue, TEXTS[0], timeout_s=2)


def test_a_reader_that_was_away_finds_its_results(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    process = workers.start(tiny_classifier)
    indices = []
    for index, result in client.stream(queue, TEXTS * 20, window=30, timeout_s=1.5):
        assert result.ok
        indices.append(index)
        if index in {0, 40}:
            time.sleep(2)
    assert indices == list(range(80))
    process.terminate()
    process.wait(timeout=60)
    assert json.loads(workers.log().read_text().splitlines()[-1])["requests"] == 80  # none ran twice


def test_each_push_is_read_once_though_connections_are_lost(own_redis: Server, queue: str) -> None:
    with Client(own_redis.url) as client, Redis.from_url(own_redis.url) as redis:
        box = client._core.mailbox(queue)

        def act(results: bytes) -> None:
            redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            redis.xadd(box.key, {"results": results})

        for i in range(20):
            result = wire.encode_result(Result(f"r-{i}", status="ok", value=i))
            request = client.submit(queue, "text", id=f"r-{i}")
            cut_and_push = threading.Timer(0.05, act, [b"[" + result + b"]"])
            cut_and_push.start()
            assert client.result(request).value == i
            cut_and_push.join()
        assert not box.unclaimed  # each of them was awaited, and came once


def test_a_bound_that_is_no_number_is_as_if_it_were_not_there(
    client: Client, queue: str, redis: Redis
) -> None:
    redis.hset(keys.config(queue), "max_length", "many")
    client.submit(queue, "text")
    assert client.depth(queue).max_length == 100_000
    for text in ("nan", "1e0", "-1", "0x1"):
        redis.hset(keys.config(queue), "max_length", text)
        client.submit(queue, "text")
        assert client.depth(queue).max_length == 100_000
    redis.hset(keys.config(queue), "max_length", "1")
    assert client.depth(queue).max_length == 1
    with pytest.raises(QueueFull):
        client.submit(queue, "text")


def test_foreign_members_among_the_queues_names_are_left_out(
    client: Client, queue: str, redis: Redis
) -> None:
    client.submit(queue, "text")
    redis.sadd(keys.QUEUES, b"\xff", "bad name")
    assert queue in client.queues()
    assert not {"bad name", "\ufffd"} & set(client.queues())
    redis.srem(keys.QUEUES, b"\xff", "bad name")


def test_a_full_queue_refuses_and_says_what_it_took(redis_url: str, queue: str, redis: Redis) -> None:
    with Client(redis_url, max_length=3) as client:
        with pytest.raises(QueueFull) as caught:
            client.submit_many(queue, [f"text {i}" for i in range(5)], ids=list("abcde"))
        assert caught.value.accepted == ["a", "b", "c"]
        assert caught.value.refused == 2
        client.submit(queue, "text 0", id="a")  # known already: no place needed
        redis.hset(keys.config(queue), "max_length", "4")
        client.submit(queue, "text 3", id="d")
        with pytest.raises(QueueFull):
            client.score(queue, "text 4")
        assert client.depth(queue) == core.Depth(waiting=4, pending=0, dead=0, max_length=4)


def test_a_stream_waits_while_the_queue_is_full(
    redis_url: str, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    with Client(redis_url, max_length=5) as client:
        assert all(result.ok for result in client.score_many(queue, TEXTS * 25))


def test_timeouts_say_what_is_known(client: Client, queue: str) -> None:
    request_id = client.submit(queue, TEXTS[0])
    with pytest.raises(ResultTimeout, match="still waiting"):
        client.result(request_id, timeout_s=0.1)
    with pytest.raises(ResultTimeout, match="not known"):
        client.result("unheard-of", timeout_s=0.1, queue=queue)
    with pytest.raises(ResultTimeout, match=r"for 0\.2 s"):
        client.score_many(queue, TEXTS, timeout_s=0.2)
    with pytest.raises(InvalidRequestError, match="name the queue"):
        client.result("unheard-of")


def test_a_deadline_in_the_far_future_is_one(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    assert client.score(queue, TEXTS[0], deadline_s=float("inf"))
    assert client.score(queue, TEXTS[0], deadline_s=1e300)


def test_silence_is_told_and_may_end_a_stream(client: Client, queue: str) -> None:
    told: list[float] = []

    def on_silence(seconds: float) -> None:
        told.append(seconds)
        if len(told) == 2:
            raise KeyError

    with pytest.raises(KeyError):
        client.score_many(queue, TEXTS, on_silence=on_silence)
    assert told == sorted(told)
    assert not client._core.mailbox(queue).awaited


def test_a_deadline_that_passed_is_an_expired_result(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    late = client.submit(queue, TEXTS[0], deadline_s=0.001)
    on_time = client.submit(queue, TEXTS[0], deadline_s=600)
    time.sleep(0.01)
    workers.start(tiny_classifier)
    assert client.result(on_time).ok
    with pytest.raises(RequestExpired):
        client.result(late).unwrap()


@pytest.mark.parametrize(
    "url",
    [
        "localhost",
        "http://localhost",
        "redis://localhost:port",
        "redis://localhost/0?protocol=3",
        "redis://localhost/0?decode_responses=true",
        "redis://localhost?db=x",
        "redis://localhost?foo=bar",
        "rediss://localhost?ssl_cert_reqs=perhaps",
    ],
)
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="Redis URL"):
        Client(url)


def test_bad_arguments_are_refused_before_anything_is_sent(client: Client, queue: str) -> None:
    for wrong in (
        lambda: client.submit("no such queue", "text"),
        lambda: client.submit(queue, "text", id="a b"),
        lambda: client.submit(queue, 5),  # type: ignore[arg-type]
        lambda: client.submit(queue, "text", ttl_s=-1),
        lambda: client.submit(queue, "text", ttl_s=1.5),  # type: ignore[arg-type]
        lambda: client.submit(queue, "text", ttl_s=True),
        lambda: client.submit(queue, "text", deadline_s=float("nan")),
        lambda: client.submit(queue, "text", deadline_s=-1),
        lambda: client.submit(queue, "text", trace="\ud800"),
        lambda: client.submit(queue, "text", options=[1]),  # type: ignore[arg-type]
        lambda: client.submit(queue, {"text": "a", "options": [1]}, options={"top_k": 1}),
        lambda: client.score(queue, "text", float("nan")),
        lambda: client.result("a", float("nan"), queue=queue),
        lambda: client.score_many(queue, ["text"], timeout_s=float("nan")),
        lambda: client.score_many(queue, ["text"], window=1.5),  # type: ignore[arg-type]
        lambda: client.submit_many(queue, ["text", "\ud800"]),
        lambda: client.submit_many(queue, ["text", "text"], ids=["a"]),
        lambda: client.score_many(queue, ["text"], window=0),
    ):
        with pytest.raises(InvalidRequestError):
            wrong()
    assert client.depth(queue).waiting == 0


def test_no_error_of_the_driver_gets_through(tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/none.sock", "redis://127.0.0.1:1"):
        with Client(url, retry_s=0.2) as client:
            for call in (
                lambda: client.submit("q", "text"),
                lambda: client.result("a", 0.2, queue="q"),
                lambda: client.score("q", "text"),
                lambda: client.score_many("q", ["text"]),
                client.queues,
                lambda: client.depth("q"),
                lambda: client.workers("q"),
            ):
                with pytest.raises(BrokerUnavailable, match="is not available"):
                    call()


def test_a_redis_without_memory_is_waited_for_and_reported(own_redis: Server, queue: str) -> None:
    with Client(own_redis.url, retry_s=0.3) as client, Redis.from_url(own_redis.url) as redis:
        client.submit(queue, TEXTS[0])
        redis.config_set("maxmemory", "1")
        with pytest.raises(BrokerUnavailable) as caught:
            client.submit(queue, TEXTS[0])
        assert caught.value.retryable
        redis.config_set("maxmemory", "0")
        client.submit(queue, TEXTS[0])
        assert client.depth(queue).waiting == 2


def test_a_refused_login_is_reported_at_once(own_redis: Server) -> None:
    with Redis.from_url(own_redis.url) as redis:
        redis.config_set("requirepass", "secret")
        redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    with Client(own_redis.url) as client:
        with pytest.raises(BrokerUnavailable) as caught:
            client.submit("q", "text")
        assert not caught.value.retryable


def test_a_forked_process_gets_its_own_results(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path, tmp_path: Path
) -> None:
    workers.start(tiny_classifier)
    assert client.score(queue, TEXTS[0])  # connections and a reply stream of the parent's exist
    report = tmp_path / "report"

    def score_from_threads() -> None:
        sys.setswitchinterval(1e-6)
        together = threading.Barrier(16)  # all at once are the first to notice the fork

        def score(text: str) -> str:
            together.wait()
            request_id = client.submit(queue, text)
            assert client.score(queue, text)
            return request_id.reply or ""

        with ThreadPoolExecutor(16) as threads:
            names = set(threads.map(score, TEXTS * 4))
        report.write_text(json.dumps([*names]))

    child = os.fork()
    if child == 0:
        try:
            score_from_threads()
        finally:
            os._exit(0)
    mine = [client.score(queue, text) for text in TEXTS * 5]
    os.waitpid(child, 0)
    assert len(mine) == 20
    # One reply stream for each process.
    [name] = json.loads(report.read_text())
    assert f"-{child}-" in name
    assert redis.keys(f"*{queue}*:reply:*{name}")
    assert len(redis.keys(f"*{queue}*:reply:*")) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_client_and_worker_survive_a_restart_of_redis(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path, number: int
) -> None:
    process = workers.start(tiny_classifier, url=own_redis.url)
    with Client(own_redis.url) as client:
        stream = client.stream(queue, (f"{TEXTS[i % 4]} {i}" for i in range(3000)), window=200)
        first = [next(stream) for _ in range(500)]
        kept = client.submit(queue, TEXTS[0])
        own_redis.stop(number)
        time.sleep(0.5)
        own_redis.start()
        rest = list(stream)
        assert client.result(kept).ok
        assert client.score(queue, TEXTS[1])
    assert [index for index, _ in [*first, *rest]] == list(range(3000))
    assert all(result.ok for _, result in [*first, *rest])
    assert process.poll() is None


def test_a_stream_submits_again_what_redis_lost(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    with Client(own_redis.url) as client, Redis.from_url(own_redis.url) as redis:
        stream = client.stream(queue, TEXTS * 10)
        answers: list[bool] = []
        reader = threading.Thread(target=lambda: answers.extend(result.ok for _, result in stream))
        reader.start()
        wait_until(lambda: redis.xlen(keys.requests(queue)) == 40)
        # A server without persistence that comes back empty: every key of the queue is gone.
        redis.delete(*redis.keys("gm:*"))
        workers.start(tiny_classifier, url=own_redis.url)
        reader.join(timeout=60)
    assert answers == [True] * 40
