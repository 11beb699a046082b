"""The worker as a process: bad requests, signals, faults of Redis, death of a neighbour."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from redis import Redis

from conftest import Server, Workers, wait_until
from graphs import NAN_ROW, ROWS, write_lookup
from gristmill import Client, keys, wire
from gristmill.core import Depth
from gristmill.errors import ErrorCode, ExitCode
from gristmill_worker.models.importer import import_model

TEXTS = ["the miller grinds the corn", "water turns the wheel", "bread", "a horse and a cart on the road"]
EMPTY = Depth(waiting=0, pending=0, dead=0, max_length=100_000)


@pytest.fixture(scope="session")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the task ``tensors`` that answers NaN or fails where a request asks for it."""
    folder = tmp_path_factory.mktemp("lookup")
    import_model(str(write_lookup(folder / "source")), folder / "model")
    return folder / "model"


def add(redis: Redis, queue: str, request_id: str, body: bytes, **fields: str) -> None:
    flat = [item for pair in fields.items() for item in pair]
    redis.execute_command("XADD", keys.requests(queue), "*", "id", request_id, "body", body, *flat)


def test_one_bad_request_gets_its_error_and_no_neighbour_is_harmed(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    bad = {
        "not-json": (b"{", ErrorCode.BAD_REQUEST),
        "no-object": (b"[]", ErrorCode.BAD_REQUEST),
        "no-text": (b"{}", ErrorCode.BAD_REQUEST),
        "wrong-type": (b'{"text": 5}', ErrorCode.BAD_REQUEST),
        "wrong-pair": (b'{"text": "a", "pair": []}', ErrorCode.BAD_REQUEST),
        "wrong-options": (b'{"text": "a", "options": 1}', ErrorCode.BAD_REQUEST),
        "unknown-option": (b'{"text": "a", "options": {"topk": 1}}', ErrorCode.BAD_REQUEST),
        "wrong-option": (b'{"text": "a", "options": {"top_k": true}}', ErrorCode.BAD_REQUEST),
        "empty": (b'{"text": " \\n"}', ErrorCode.EMPTY_INPUT),
        "too-long": (
            json.dumps({"text": "mill " * 500, "options": {"truncate": False}}).encode(),
            ErrorCode.TOO_LONG,
        ),
        "too-large": (b'{"text": "%s"}' % (b"x" * wire.MAX_BODY_BYTES), ErrorCode.TOO_LARGE),
    }
    good = {f"good-{i}": json.dumps({"text": f"{TEXTS[i % 4]} {i}"}).encode() for i in range(20)}
    good["long"] = json.dumps({"text": "mill " * 500}).encode()
    for request_id, body in good.items():
        add(redis, queue, request_id, body)
    for request_id, (body, _) in bad.items():
        add(redis, queue, request_id, body)
    add(redis, queue, "bad-ttl", b'{"text": "a"}', ttl="soon")
    # all in one window
    workers.start(tiny_classifier, config="batch: {max_items: 64, max_wait_ms: 100}")
    for request_id in good:
        assert client.result(request_id, queue=queue).ok
    for request_id, (_, code) in bad.items():
        result = client.result(request_id, queue=queue)
        assert (result.status, result.error and result.error[0]) == ("error", code), request_id
    assert client.result("bad-ttl", queue=queue).error
    assert client.result("long", queue=queue).truncated
    assert client.depth(queue) == EMPTY


def test_a_batch_is_halved_until_the_request_to_blame_stands_alone(
    client: Client, workers: Workers, queue: str, lookup: Path
) -> None:
    workers.start(lookup, config="batch: {max_items: 64, max_wait_ms: 100}")
    rows = [[i % (ROWS - 1)] for i in range(20)]
    rows[3], rows[11] = [NAN_ROW], [ROWS + 5]
    results = client.score_many(queue, [{"tensors": {"ids": row}} for row in rows])
    for i, result in enumerate(results):
        if i == 3:
            assert result.error
            assert result.error[0] == ErrorCode.INVALID_OUTPUT
        elif i == 11:
            assert result.error
            assert result.error[0] == ErrorCode.ENGINE_ERROR
        else:
            assert result.value == {"rows": [[2 * rows[i][0], 2 * rows[i][0] + 1]]}


def test_no_truncation_is_a_setting_too(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, env={"GRISTMILL_TRUNCATE": "false"})
    (refused, cut) = client.score_many(
        queue, ["mill " * 500, {"text": "mill " * 500, "options": {"truncate": True}}]
    )
    assert refused.error
    assert refused.error[0] == ErrorCode.TOO_LONG
    assert cut.truncated


def test_sigterm_drains(client: Client, workers: Workers, queue: str, tiny_classifier: Path) -> None:
    ids = client.submit_many(queue, [f"{TEXTS[i % 4]} {i}" for i in range(2000)])
    process = workers.start(tiny_classifier)
    wait_until(lambda: client.depth(queue).waiting < 2000)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == ExitCode.OK
    depth = client.depth(queue)
    assert depth.pending == 0  # what was taken was finished
    assert depth.waiting > 0
    workers.start(tiny_classifier)
    assert all(client.result(request_id).ok for request_id in ids)


def test_a_second_signal_ends_the_process_at_once_and_loses_nothing(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    config = "{lease_s: 1}"
    ids = client.submit_many(queue, [f"{TEXTS[i % 4]} {i}" for i in range(4000)])
    process = workers.start(tiny_classifier, config=config)
    wait_until(lambda: client.depth(queue).waiting < 4000)
    # Stopped in the middle of its window, both signals find it there.
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) == ExitCode.FORCED
    workers.start(tiny_classifier, config=config)
    assert all(client.result(request_id).ok for request_id in ids)
    assert client.depth(queue) == EMPTY


def test_a_dead_workers_requests_are_taken_over_after_the_lease(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    ids = client.submit_many(queue, [f"{TEXTS[i % 4]} {i}" for i in range(1000)])
    victim = workers.start(tiny_classifier, config="{lease_s: 1}")
    wait_until(lambda: client.depth(queue).pending > 0)
    victim.send_signal(signal.SIGSTOP)
    held = client.depth(queue).pending
    victim.kill()
    victim.wait()
    assert held > 0
    workers.start(tiny_classifier, config="{lease_s: 1}")
    results = [client.result(request_id) for request_id in ids]
    assert all(result.ok for result in results)
    assert client.depth(queue) == EMPTY


def test_a_batch_longer_than_the_lease_is_not_taken_over(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    # 4096 requests in one window take several leases of one second.
    config = "{lease_s: 1, batch: {max_items: 4096, shapes: [[1, 48]]}}"
    ids = client.submit_many(queue, [f"{TEXTS[i % 4]} {i}" for i in range(6000)])
    for _ in range(2):
        workers.start(tiny_classifier, config=config)
    assert all(client.result(request_id, 120).ok for request_id in ids)
    done = sum(int(worker["requests"]) for worker in _counted(client, queue, 6000))
    assert done == 6000
    assert all(int(worker["dropped"]) == 0 for worker in client.workers(queue))


def _counted(client: Client, queue: str, total: int) -> list[dict[str, str]]:
    """Return the workers' heartbeats once they show ``total`` requests."""
    wait_until(lambda: sum(int(worker["requests"]) for worker in client.workers(queue)) >= total)
    return client.workers(queue)


def test_a_frozen_worker_that_wakes_up_answers_nothing_twice(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    frozen = workers.start(tiny_classifier, config="{lease_s: 1}")
    ids = client.submit_many(queue, [f"{TEXTS[i % 4]} {i}" for i in range(3000)])
    wait_until(lambda: client.depth(queue).waiting < 3000)
    frozen.send_signal(signal.SIGSTOP)
    held = client.depth(queue).pending
    workers.start(tiny_classifier, config="{lease_s: 1}")
    before = [client.result(request_id) for request_id in ids]
    frozen.send_signal(signal.SIGCONT)
    done = _counted(client, queue, 3000)
    time.sleep(1)
    assert held > 0
    assert {worker["name"] for worker in done} == {"w0", "w1"}
    assert sum(int(worker["requests"]) for worker in client.workers(queue)) == 3000
    assert [client.result(str(request_id), queue=queue) for request_id in ids] == before


def test_three_kills_and_every_id_has_exactly_one_result(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    """10,000 requests, three SIGKILLs of the worker; what it writes is counted at the keys themselves."""
    total = 10_000
    config = "{lease_s: 1}"
    process = workers.start(tiny_classifier, url=own_redis.url, config=config)
    ids = [f"r-{i}" for i in range(total)]
    with Client(own_redis.url) as client:
        pushed: dict[str, int] = {}
        client.score(queue, TEXTS[0])  # opens the reply stream
        client.submit_many(queue, [f"{TEXTS[i % 4]} {i}" for i in range(total)], ids=ids)
        box = client._core.mailbox(queue)
        kills = 0
        with Redis.from_url(own_redis.url, protocol=2) as redis:
            last = b"0"
            while len(pushed) < total or client.depth(queue) != EMPTY:
                reply = redis.execute_command("XREAD", "COUNT", 100, "BLOCK", 200, "STREAMS", box.key, last)
                for entry_id, fields in reply[0][1] if reply else ():
                    last = entry_id
                    for result in wire.decode_results(fields.get(b"results", b"[]")):
                        if result.id.startswith("r-"):  # not the one that opened the stream
                            pushed[result.id] = pushed.get(result.id, 0) + 1
                redis.expire(box.key, 120)
                if kills < 3 and len(pushed) > (kills + 1) * total // 5:
                    process.kill()
                    process.wait()
                    kills += 1
                    process = workers.start(tiny_classifier, url=own_redis.url, config=config)
            stored = redis.mget([keys.result(queue, request_id) for request_id in ids])
        results = [wire.decode_result(data) for data in stored if data is not None]
    assert kills == 3
    assert [result.id for result in results] == ids
    assert all(result.ok for result in results)
    assert set(pushed) == set(ids)
    assert set(pushed.values()) == {1}


def test_a_request_that_was_delivered_too_often_is_a_dead_letter(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    request_id = client.submit(queue, TEXTS[0])
    other = client.submit(queue, TEXTS[1])
    redis.execute_command("XGROUP", "CREATE", keys.requests(queue), keys.GROUP, "0")
    ((_, ((entry, _), *_)),) = redis.execute_command(
        "XREADGROUP", "GROUP", keys.GROUP, "crashing", "STREAMS", keys.requests(queue), ">"
    )
    claim = ("XCLAIM", keys.requests(queue), keys.GROUP, "crashing", 0, entry, "RETRYCOUNT", 2)
    redis.execute_command(*claim)
    workers.start(tiny_classifier, config="{lease_s: 1, max_deliveries: 2}")
    result = client.result(request_id)
    assert result.error
    assert result.error[0] == ErrorCode.DEAD_LETTERED
    assert client.result(other).ok
    ((_, letter),) = redis.execute_command("XRANGE", keys.dead(queue), "-", "+")
    assert letter[b"id"].decode() == request_id
    assert letter[b"reason"] == b"max_deliveries"


def test_foreign_values_at_our_keys_stop_nothing(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    redis.lpush(keys.result(queue, "listed"), "x")
    redis.lpush(keys.dead(queue), "x")
    add(redis, queue, "listed", b'{"text": "bread"}', reply="r")
    redis.lpush(keys.reply(queue, "r"), "x")
    redis.execute_command("XADD", keys.requests(queue), "*", *[str(i) for i in range(10_000)])
    after = client.submit(queue, TEXTS[0])
    workers.start(tiny_classifier)
    assert client.result(after).ok
    assert client.result("listed", queue=queue).ok
    wait_until(lambda: redis.xlen(keys.requests(queue)) == 0)


def test_a_worker_waits_for_a_redis_that_comes_later(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    own_redis.stop()
    process = workers.start(tiny_classifier, url=own_redis.url, ready=False)
    wait_until(lambda: "redis_unavailable" in workers.log().read_text())
    own_redis.start()
    with Client(own_redis.url) as client:
        assert client.score(queue, TEXTS[0])
    assert process.poll() is None


def test_a_drain_without_redis_ends_too(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    process = workers.start(tiny_classifier, url=own_redis.url)
    own_redis.stop()
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--threads", "0"), ExitCode.USAGE, "threads"),
        (("--cores", "a-b"), ExitCode.USAGE, "CPU list"),
        (("--cores", "99999"), ExitCode.BAD_INPUT, "cores"),
        (("--engine", "abacus"), ExitCode.BAD_INPUT, "engine"),
        (("--redis", "http://x"), ExitCode.USAGE, "Redis URL"),
        (("--model", "/nowhere"), ExitCode.BAD_INPUT, "gristmill-worker model import"),
        (("--queue", "a b"), ExitCode.BAD_INPUT, "queue"),
    ],
)
def test_wrong_arguments_end_with_one_line_and_a_named_code(
    workers: Workers, tiny_classifier: Path, flags: tuple[str, ...], code: int, message: str
) -> None:
    process = workers.start(tiny_classifier, *flags, ready=False)
    assert process.wait(timeout=60) == code
    log = workers.log().read_text()
    assert message in log
    assert "Traceback" not in log


def test_a_refused_login_ends_the_worker(
    own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    with Redis.from_url(own_redis.url) as redis:
        redis.config_set("requirepass", "secret")
    process = workers.start(tiny_classifier, url=own_redis.url, ready=False)
    assert process.wait(timeout=60) == ExitCode.BROKER_UNAVAILABLE
    assert "refused the login" in workers.log().read_text()


def test_a_worker_stays_on_its_cores(workers: Workers, tiny_classifier: Path) -> None:
    process = workers.start(tiny_classifier, "--cores", "0")
    masks = subprocess.run(
        ["grep", "-h", "Cpus_allowed_list", *map(str, Path(f"/proc/{process.pid}/task").glob("*/status"))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    assert {mask.split()[-1] for mask in masks if mask} == {"0"}
