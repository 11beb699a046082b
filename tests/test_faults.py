"""Faults of requests and of the world around a worker, and that only the one to blame feels them."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from redis import Redis

from conftest import Server, Workers, wait_until
from faulty_worker import CRASHED
from graphs import write_lookup
from gristmill import Client, keys
from gristmill.errors import ErrorCode, ExitCode
from gristmill_worker.models.importer import import_model

TEXTS = ["the miller grinds the corn", "water and flour", "bread", "a horse and a cart on the road"]
FAULTY = (str(Path(__file__).with_name("faulty_worker.py")),)
CONFIG = "{lease_s: 1, max_deliveries: 2, batch: {max_items: 64, max_wait_ms: 100}}"


def test_a_request_that_crashes_workers_takes_no_neighbour_along(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    ids = client.submit_many(queue, [*TEXTS * 2, "the wheel turns", *TEXTS * 2])
    crashes = 0
    while crashes < 10:
        process = workers.start(tiny_classifier, config=CONFIG, program=FAULTY, ready=False)
        wait_until(lambda process=process: process.poll() is not None or client.depth(queue).dead)  # type: ignore[misc]
        if client.depth(queue).dead:
            break
        assert process.returncode == CRASHED
        crashes += 1
    results = [client.result(request_id) for request_id in ids]
    assert crashes == 2  # with the others, and alone: then it is given up
    assert [i for i, result in enumerate(results) if not result.ok] == [8]
    assert results[8].error
    assert results[8].error[0] == ErrorCode.DEAD_LETTERED
    ((_, letter),) = redis.execute_command("XRANGE", keys.dead(queue), "-", "+")
    assert letter[b"id"].decode() == ids[8]
    assert client.depth(queue).pending == 0


def test_a_request_that_holds_the_engine_up_for_ever_takes_no_neighbour_along(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    ids = client.submit_many(queue, [*TEXTS * 2, "the stone rests", *TEXTS * 2])
    ends = 0
    while ends < 10:
        config = f"{{batch_timeout_s: 1, {CONFIG[1:]}"
        process = workers.start(tiny_classifier, config=config, program=FAULTY, ready=False)
        wait_until(lambda process=process: process.poll() is not None or client.depth(queue).dead)  # type: ignore[misc]
        if client.depth(queue).dead:
            break
        assert process.returncode == -signal.SIGALRM
        assert "_run_batch" in workers.log(ends).read_text()  # where it was
        ends += 1
    results = [client.result(request_id) for request_id in ids]
    assert ends == 2  # with the others, and alone: then it is given up
    assert [result.error and result.error[0] for result in results] == [
        *[None] * 8,
        ErrorCode.DEAD_LETTERED,
        *[None] * 8,
    ]
    ((_, letter),) = redis.execute_command("XRANGE", keys.dead(queue), "-", "+")
    assert letter[b"id"].decode() == ids[8]
    assert letter[b"reason"] == b"max_deliveries"
    assert client.depth(queue).pending == 0


def test_batches_in_time_are_left_alone_however_many(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    process = workers.start(tiny_classifier, config="{batch_timeout_s: 1, batch: {shapes: [[1, 48]]}}")
    started = time.monotonic()
    while time.monotonic() - started < 3:
        assert client.score(queue, TEXTS[0])
    time.sleep(1.5)  # idle for longer than a batch may take
    assert client.score(queue, TEXTS[0])
    assert process.poll() is None


def test_an_error_of_the_tokenizer_is_one_requests_and_no_text_is_logged(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, config=CONFIG, program=FAULTY)
    results = client.score_many(queue, [*TEXTS, "it may explode, says secret-4711", *TEXTS])
    assert [i for i, result in enumerate(results) if not result.ok] == [4]
    assert results[4].error == ("bad_request", "the request cannot be encoded: the tokenizer is broken")
    log = workers.log().read_text()
    assert "request_failed" in log
    assert "secret-4711" not in log


def test_huge_texts_and_pairs_are_cut_before_they_cost(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    process = workers.start(tiny_classifier, config=CONFIG)
    huge = [". " * 500_000, "." * 1_000_000, "mill " * 200_000, " " * 1_000_000 + "mill"]
    pairs = [("." * 500_000, "mill " * 100_000), ("mill", ". " * 400_000)]
    results = client.score_many(queue, [*huge, *pairs, *TEXTS])
    assert all(result.ok for result in results)
    assert [result.truncated for result in results] == [True, True, True, False, True, True] + [False] * 4
    assert psutil.Process(process.pid).memory_info().rss < 800 * 2**20


def test_a_refused_request_is_pushed_to_who_asked(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    assert client.score(queue, TEXTS[0])  # there is a reply stream
    name, stream = client._core.name, keys.requests(queue)
    for request_id, body in (("no-json", "{"), ("large", "x" * 1_100_000)):
        fields = ("id", request_id, "body", body, "reply", name, "ttl", "0")
        redis.execute_command("XADD", stream, "*", *fields)
        wait_until(lambda request_id=request_id: redis.get(keys.result(queue, request_id)) == b"done")  # type: ignore[misc]
    entries = redis.execute_command("XRANGE", keys.reply(queue, name), "-", "+")
    pushed = [r["id"] for _, f in entries for r in json.loads(f.get(b"results", b"[]"))]
    assert pushed[-2:] == ["no-json", "large"]


def test_a_result_that_redis_refuses_is_an_error_and_stops_nothing(
    own_redis: Server, workers: Workers, queue: str, tmp_path: Path
) -> None:
    import_model(str(write_lookup(tmp_path / "source", width=1000)), tmp_path / "model")
    workers.start(tmp_path / "model", url=own_redis.url, config=CONFIG)
    with Client(own_redis.url) as client, Redis.from_url(own_redis.url) as redis:
        redis.config_set("proto-max-bulk-len", 1024 * 1024)
        bodies = [{"tensors": {"ids": [6] * length}} for length in (1, 400, 2)]
        small, large, other = client.score_many(queue, bodies)
    assert small.ok
    assert other.ok
    assert large.error
    assert large.error[0] == ErrorCode.TOO_LARGE


def test_a_drain_without_redis_ends_quietly(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    process = workers.start(tiny_classifier, url=own_redis.url)
    with Client(own_redis.url) as client:
        client.submit_many(queue, [f"{TEXTS[i % 4]} {i}" for i in range(3000)])
        wait_until(lambda: client.depth(queue).waiting < 3000)
    own_redis.stop(signal.SIGKILL)
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK
    assert len(workers.log().read_text().splitlines()) < 50


def test_a_signal_while_the_model_loads_ends_the_worker(
    workers: Workers, minilm: Path, client: Client, queue: str
) -> None:
    process = workers.start(minilm, ready=False)
    wait_until(lambda: '"loading"' in workers.log().read_text())
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK
    assert "engine_ready" not in workers.log().read_text()


def test_a_worker_that_leaves_is_no_consumer_any_more(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    for _ in range(2):
        process = workers.start(tiny_classifier)
        assert client.score(queue, TEXTS[0])
        process.terminate()
        process.wait(timeout=60)
    killed = workers.start(tiny_classifier)
    killed.kill()
    killed.wait()
    consumers = redis.execute_command("XINFO CONSUMERS", keys.requests(queue), keys.GROUP)
    assert [consumer["name"] for consumer in consumers] == [b"w2"]


def test_an_entry_that_somebody_deletes_stops_nothing(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    with Client(own_redis.url) as client, Redis.from_url(own_redis.url, protocol=2) as redis:
        client.submit_many(queue, TEXTS)
        stream = keys.requests(queue)
        redis.execute_command("XGROUP", "CREATE", stream, keys.GROUP, "0")
        ((_, entries),) = redis.execute_command(
            "XREADGROUP", "GROUP", keys.GROUP, "gone", "COUNT", 2, "STREAMS", stream, ">"
        )
        redis.execute_command("XDEL", stream, entries[0][0])
        workers.start(tiny_classifier, url=own_redis.url, config=CONFIG)
        assert client.score(queue, TEXTS[0])
        wait_until(lambda: redis.xlen(stream) == 0)
        wait_until(lambda: redis.execute_command("XPENDING", stream, keys.GROUP)["pending"] == 0)
        assert client.depth(queue).waiting == 0


@pytest.mark.parametrize("name", ["topics", "embeddings"])
def test_every_configuration_serves(
    own_redis: Server, workers: Workers, tiny_classifier: Path, minilm: Path, name: str, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "topics").symlink_to(tiny_classifier)
    (models / "minilm").symlink_to(minilm)
    config = Path(__file__).parent.parent / "configs" / f"{name}.yaml"
    process = workers.start_command(["serve", str(config), "--redis", own_redis.url], cwd=tmp_path)
    with Client(own_redis.url) as client:
        assert client.score(name, "The bread was warm.", 120)
        (worker,) = client.workers(name)
    assert int(worker["pid"]) == process.pid


def test_the_time_in_a_result_is_the_time_that_passed(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, config="batch: {shapes: [[1, 48]]}")
    started = time.monotonic()
    results = client.score_many(queue, [f"{TEXTS[i % 4]} {i}" for i in range(500)])
    passed_ms = (time.monotonic() - started) * 1000
    totals = [sum(result.timing_ms.values()) for result in results]
    assert max(totals) < passed_ms
    # They run one after the other, so the last waits for all: most of the time is waiting, and counted.
    runs = sum(result.timing_ms["run"] for result in results[:256])
    assert max(totals) > runs / 2
