"""The files of configs/recipes, each in the server that it is made for: real requests, queue and worker."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from redis import Redis

from conftest import LABELS, wait_until
from gristmill import ErrorCode, ScoringError, keys
from gristmill.errors import ExitCode
from mill import RECIPES, Mill, NodeClient, Web
from topologies import free_ports

TEXTS: Final = [f"bread number {i}" for i in range(40)]
USED_BEFORE_THE_FORK: Final = "import flask_app\nflask_app.client.queues()\napp = flask_app.app\n"
WEB: Final = {  # {} is the port; each command has two worker processes
    "fastapi": "uvicorn fastapi_app:app --workers 2 --port {}",
    "flask": "gunicorn used_before_the_fork:app --workers 2 --threads 8 --preload --bind 127.0.0.1:{}",
    "django": "gunicorn django_app:app --workers 2 --threads 8 --bind 127.0.0.1:{}",
}


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory, tiny_classifier: Path) -> Iterator[Mill]:
    made = Mill(tmp_path_factory.mktemp("mill"), tiny_classifier)
    yield made
    made.close()


@pytest.fixture(scope="module", params=WEB)
def web(mill: Mill, request: pytest.FixtureRequest) -> Iterator[Web]:
    (mill.folder / "used_before_the_fork.py").write_text(USED_BEFORE_THE_FORK)
    made = Web(request.param, free_ports(1)[0])
    with mill.running(*WEB[made.name].format(made.port).split()) as process:
        wait_until(lambda: made.listens() or process.poll() is not None)
        yield made


def test_a_backend_answers_concurrent_requests_from_each_of_its_processes(mill: Mill, web: Web) -> None:
    expected = [result.value[0]["label"] for result in mill.client.score_many(mill.queue, TEXTS)]
    before = mill.readers()

    def each_process_has_answered() -> bool:
        answers = list(pool.map(lambda text: web.post({"text": text}), TEXTS))
        assert {answer.status for answer in answers} == {200}
        assert [answer.value[0]["label"] for answer in answers] == expected
        # A reply stream for each process: no fork goes on with the connections of its parent.
        return len(mill.readers() - before) == 2

    with ThreadPoolExecutor(16) as pool:
        wait_until(each_process_has_answered)
    assert expected[0] in LABELS


def test_a_bad_request_is_the_callers_fault(mill: Mill, web: Web) -> None:
    empty = web.post({"text": ""})
    assert empty.status == 422
    assert "empty_input" in empty.value["error"]
    assert web.post({"text": 7}).status == 422
    assert web.post([]).status == 422
    assert web.post({"text": "bread" * 300_000}).status == 413
    assert web.post(b"{").status in {400, 422}
    assert web.post({"text": "bread"}).status == 200


def test_each_code_of_a_failed_request_has_an_http_status() -> None:
    statuses = {code.value: ScoringError("id", code.value, "").http_status for code in ErrorCode}
    blamed = dict.fromkeys(["bad_request", "empty_input", "too_long"], 422) | {"too_large": 413}
    ours = dict.fromkeys(["engine_error", "invalid_output", "dead_lettered"], 500)
    assert statuses == blamed | ours | {"expired": 504, "cancelled": 409}
    assert ScoringError("id", "a code of a newer worker", "").http_status == 500


def test_a_full_queue_asks_the_caller_to_come_back(mill: Mill, web: Web) -> None:
    mill.client.set_limit(mill.queue, 0)
    try:
        answer = web.post({"text": "bread"})
    finally:
        mill.client.set_limit(mill.queue, None)
    assert (answer.status, answer.retry_after) == (503, "1")
    assert answer.value == {"error": "Service Unavailable"}
    assert web.post({"text": "bread"}).status == 200


def test_without_a_worker_a_request_times_out_and_is_never_run(mill: Mill, web: Web) -> None:
    with mill.away():
        answer = web.post({"text": "bread"})
    assert (answer.status, answer.retry_after) == (504, None)
    assert web.post({"text": "bread"}).status == 200
    wait_until(lambda: mill.unfinished() == 0)


def test_a_redis_that_is_away_is_not_waited_for_and_is_found_again(mill: Mill, web: Web) -> None:
    assert web.post({"text": "bread"}).status == 200
    mill.server.stop()
    try:
        answer = web.post({"text": "bread"})
    finally:
        mill.start_redis()
    assert (answer.status, answer.retry_after) == (503, "1")
    wait_until(lambda: web.post({"text": "bread"}).status == 200)


@pytest.mark.parametrize("web", ["fastapi"], indirect=True)
def test_a_request_whose_caller_hangs_up_is_cancelled(mill: Mill, web: Web) -> None:
    wait_until(lambda: mill.unfinished() == 0)
    with mill.away(), Redis.from_url(mill.url) as redis:
        connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=60)
        body = json.dumps({"text": "bread"})
        connection.request("POST", "/score", body, {"Content-Type": "application/json"})
        wait_until(lambda: mill.unfinished() == 1)
        [[_, fields]] = redis.xrange(keys.requests(mill.queue))
        key = keys.result(mill.queue, fields[b"id"].decode())
        assert redis.get(key) == b"pending"
        connection.close()
        wait_until(lambda: b'"cancelled"' in redis.get(key))
    wait_until(lambda: mill.unfinished() == 0)


def celery(mill: Mill, lists: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
    """Send a task for each of ``lists`` from a process of its own, as a backend would, and wait for all."""
    code = (
        "import json, sys; from celery import group; from celery_tasks import score; "
        "print(json.dumps(group(score.s(texts) for texts in json.loads(sys.argv[1]))().get(timeout=90)))"
    )
    values: list[list[dict[str, Any]]] = json.loads(mill.run("-c", code, json.dumps(lists)).stdout)
    return values


@pytest.mark.parametrize("pool", ["prefork -c 2", "solo", "threads -c 4"])
def test_celery_tasks_score_lists_and_keep_the_place_of_what_failed(mill: Mill, pool: str) -> None:
    lists = [[*TEXTS[:5], "", *TEXTS[5:]]] * 6
    with mill.running("celery", "-A", "celery_tasks", "worker", "-P", *pool.split()):
        for values in celery(mill, lists):
            assert len(values) == len(TEXTS) + 1
            assert values.pop(5) == {"error": "empty_input"}
            assert {value["value"][0]["label"] for value in values} <= {*LABELS}


def test_the_list_of_a_celery_process_that_is_killed_is_scored_by_another(mill: Mill) -> None:
    wait_until(lambda: mill.unfinished() == 0)
    before = mill.readers()
    command = "celery -A celery_tasks worker -P prefork -c 2"
    with mill.running(*command.split(), clean=False) as process, ThreadPoolExecutor(1) as pool:
        with mill.away():
            answers = pool.submit(celery, mill, [TEXTS, TEXTS])
            wait_until(lambda: mill.unfinished() == 2 * len(TEXTS) or answers.done())
            assert len(mill.readers() - before) == 2
            psutil.Process(process.pid).children()[0].kill()
        assert [len(values) for values in answers.result()] == [len(TEXTS)] * 2


def test_rq_jobs_are_enqueued_without_a_client_of_ours(mill: Mill, tiny_classifier: Path) -> None:
    command = ["rq", "--queue", mill.queue, "--model", str(tiny_classifier), "--redis", mill.url]
    worker = mill.workers.start_command(command)
    with Redis.from_url(mill.url) as redis:
        wait_until(lambda: redis.scard("rq:workers") or worker.poll() is not None)
    done = mill.run(str(RECIPES / "rq_enqueue.py"), "bread", "", "water", code=1)
    worker.terminate()
    assert worker.wait(timeout=60) == ExitCode.OK
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["bread", "water"]
    assert mill.label("bread") in done.stdout
    assert "failed: " in done.stderr
    assert "empty_input" in done.stderr


def test_a_node_client_needs_no_more_than_the_wire_contract(mill: Mill, tmp_path: Path) -> None:
    with NodeClient(tmp_path, mill.url, mill.queue) as node:
        node.send(*TEXTS * 10, "", top_k=None)
        *values, empty = node.receive()
        assert [value[0]["label"] for value in values[:40]] == [mill.label(text) for text in TEXTS]
        assert {len(value) for value in values} == {len(LABELS)}
        assert empty == "empty_input"
        assert mill.queue in mill.client.queues()

        mill.client.set_limit(mill.queue, 0)
        node.send("bread")
        assert node.receive() == ["queue_full"]
        mill.client.set_limit(mill.queue, None)

        with mill.away():
            node.send("bread", timeout_s=1)
            assert node.receive() == ["timeout"]

            wait_until(lambda: mill.unfinished() <= 1)  # the one that is too late now
            node.send(*TEXTS)
            wait_until(lambda: mill.unfinished() == len(TEXTS) + 1)
            mill.server.stop()
            mill.start_redis()
        assert {value[0]["label"] for value in node.receive()} <= {*LABELS}

        mill.server.stop()
        node.send("bread", timeout_s=1)
        assert node.receive() == ["timeout"]
        mill.start_redis()
        node.send("bread")
        assert node.receive()[0][0]["label"] in LABELS
