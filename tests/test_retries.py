"""Requests whose error may pass are tried again, later, and nobody else notices."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from conftest import Workers, wait_until
from gristmill import Client, keys
from gristmill.errors import ErrorCode, ExitCode, Status
from gristmill_worker.sources import deferred

FAULTY = (str(Path(__file__).with_name("faulty_worker.py")),)
TEXTS = ["the miller grinds the corn", "water and flour", "bread", "a horse and a cart on the road"]
SOON = "{lease_s: 1, retry: {backoff_s: 0.05}}"
NEVER = "{lease_s: 1, retry: {backoff_s: 3600, max_backoff_s: 3600}}"  # in the time of a test


def pending(redis: Redis, queue: str) -> list[tuple[str, int]]:
    """Return whose each pending entry is, and how often it was delivered."""
    rows: list[Any] = redis.xpending_range(keys.requests(queue), keys.GROUP, "-", "+", 10_000)
    return [(row["consumer"].decode(), row["times_delivered"]) for row in rows]


def wait_for_retry(workers: Workers, number: int = 0) -> None:
    """Wait until the worker puts a request off by more than a test takes."""
    wait_until(lambda: re.search(r'"retry_in_s": [1-3]\d{3}', workers.log(number).read_text()))


def test_an_error_that_passes_costs_time_and_no_answer(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    process = workers.start(tiny_classifier, config=SOON, program=FAULTY)
    results = client.score_many(queue, [*TEXTS, "the sack", *TEXTS], timeout_s=60)
    assert [result.ok for result in results] == [True] * 9
    assert [result.attempts for result in results] == [1] * 4 + [3] + [1] * 4
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK
    assert '"retries": 2' in workers.log().read_text()


def test_one_that_stays_is_the_result_after_the_last_attempt(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, config=SOON, program=FAULTY)
    *_, failed = results = client.score_many(queue, [*TEXTS, "barley"], timeout_s=60)
    assert failed.attempts == 3
    assert failed.error == (ErrorCode.ENGINE_ERROR, "the engine failed: std::bad_alloc (3 attempts)")
    assert [result.attempts for result in results[:4]] == [1] * 4
    assert pending(redis, queue) == []
    assert client.depth(queue).dead == 0


def test_any_other_error_is_final_at_once(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, config=NEVER, program=FAULTY)
    (failed,) = client.score_many(queue, ["oats"], timeout_s=60)
    assert failed.attempts == 1
    assert failed.error == (ErrorCode.ENGINE_ERROR, "there is nothing to be done")


def test_while_one_waits_everything_else_runs_and_nobody_takes_it(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    process = workers.start(tiny_classifier, config=NEVER, program=FAULTY)
    request_id = client.submit(queue, "barley")
    wait_for_retry(workers)
    workers.start(tiny_classifier, config=NEVER, program=FAULTY)
    ends = time.monotonic() + 3  # several leases
    while time.monotonic() < ends:
        results = client.score_many(queue, TEXTS * 5, timeout_s=60)
        assert [(result.ok, result.attempts) for result in results] == [(True, 1)] * 20
    assert pending(redis, queue) == [("w0", 1)]
    assert client.cancel(queue, request_id) == {request_id: Status.CANCELLED}
    assert client.result(request_id).status == Status.CANCELLED
    assert process.poll() is None


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_waits_is_left_to_others_by_a_worker_that_ends_and_its_count_goes_on(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path, end: signal.Signals
) -> None:
    request_id = client.submit(queue, "barley")
    for number in range(2):
        process = workers.start(tiny_classifier, config=NEVER, program=FAULTY)
        wait_for_retry(workers, number)
        assert pending(redis, queue) == [(f"w{number}", number + 1)]
        process.send_signal(end)
        process.wait(timeout=60)
    workers.start(tiny_classifier, config=NEVER)  # it has no fault
    result = client.result(request_id, timeout_s=60)
    assert result.ok
    assert result.attempts == 3


def test_the_last_attempt_may_be_another_workers(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    request_id = client.submit(queue, "barley")
    for number in range(2):
        process = workers.start(tiny_classifier, config=NEVER, program=FAULTY)
        wait_for_retry(workers, number)
        process.kill()
        process.wait()
    workers.start(tiny_classifier, config=NEVER, program=FAULTY)
    result = client.result(request_id, timeout_s=60)
    assert result.error
    assert result.error[1].endswith("(3 attempts)")


def test_a_deadline_ends_the_wait(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, config=NEVER, program=FAULTY)
    request_id = client.submit(queue, "barley", deadline_s=3)
    result = client.result(request_id, timeout_s=60)
    assert result.status == Status.EXPIRED
    assert '"retry_in_s": 2.' in workers.log().read_text()
    assert pending(redis, queue) == []


def test_deliveries_bound_the_attempts(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    config = "{max_deliveries: 2, retry: {max_attempts: 9, backoff_s: 0.05}}"
    workers.start(tiny_classifier, config=config, program=FAULTY)
    (failed,) = client.score_many(queue, ["barley"], timeout_s=60)
    assert failed.error
    assert failed.error[0] == ErrorCode.ENGINE_ERROR
    assert failed.attempts == 2
    assert client.depth(queue).dead == 0


def test_more_errors_than_may_wait_stop_the_taking_of_new_requests_until_some_are_done(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, config="{retry: {max_attempts: 2, backoff_s: 8}}", program=FAULTY)
    bad = client.submit_many(queue, [f"barley {i}" for i in range(deferred.MOST + 1000)])
    good = client.submit_many(queue, TEXTS)
    most = 0
    while client.depth(queue).waiting:
        most = max(most, len(pending(redis, queue)))
        time.sleep(0.02)  # leave Redis to the worker
    assert most <= deferred.MOST + 3 * 256  # what comes on top was taken before that
    assert all(client.result(each, timeout_s=60).ok for each in good)
    results = [client.result(each, timeout_s=60) for each in bad]
    assert {(result.attempts, result.ok) for result in results} == {(2, False)}
