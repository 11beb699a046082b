"""Equal requests run once, those with a known answer not at all; each gets the answer it would get alone."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from conftest import Workers, wait_until
from graphs import NAN_ROW, ROWS, write_lookup
from gristmill import Client, keys, wire
from gristmill.errors import ErrorCode, Status
from gristmill.wire import Request, Result
from gristmill_worker.jobs import Answer, Job, everyone, part_late
from gristmill_worker.models.importer import import_model
from gristmill_worker.sharing import ENTRY_BYTES, Answers, Sharing
from gristmill_worker.sources.base import Delivery

FAULTY = (str(Path(__file__).with_name("faulty_worker.py")),)
CACHE = "{result_cache_mb: 1}"


@pytest.fixture(scope="session")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookup")
    import_model(str(write_lookup(folder / "source")), folder / "model")
    return folder / "model"


def job(body: bytes, deliveries: int = 1, deadline_ms: int | None = None) -> Job:
    request = Request("id", body, deadline_ms=deadline_ms)
    return Job(Delivery(b"1-1", {}, deliveries), request, wire.decode_body(body))


def counters(client: Client, queue: str, requests: int) -> dict[str, int]:
    """Return the counters of the queue's only worker once it has counted so many requests."""

    def found() -> dict[str, str]:
        (worker,) = client.workers(queue)
        return worker

    wait_until(lambda: int(found()["requests"]) >= requests)
    return {name: int(value) for name, value in found().items() if value.isdigit()}


ONE = st.lists(st.integers(0, ROWS), max_size=2)  # the last row is missing: the engine fails on it
BODIES = st.builds(
    lambda ids, options: {"tensors": {"ids": ids}} | options,
    ONE,
    st.sampled_from([{}, {"options": {"encoding": "json"}}, {"options": {"encoding": "odd"}}]),
)


def expected(body: dict[str, Any]) -> tuple[str | None, Any]:
    """Return the code of the error, or the value."""
    ids = body["tensors"]["ids"]
    if body.get("options") == {"encoding": "odd"}:
        return ErrorCode.BAD_REQUEST, None
    if not ids:
        return ErrorCode.EMPTY_INPUT, None
    if ROWS in ids:
        return ErrorCode.ENGINE_ERROR, None
    if NAN_ROW in ids:
        return ErrorCode.INVALID_OUTPUT, None
    return None, {"rows": [[2.0 * i, 2.0 * i + 1] for i in ids]}


@pytest.mark.parametrize("cache_mb", [0, 0.004, 1], ids=["no cache", "a small cache", "a cache"])
def test_every_request_gets_what_it_would_get_alone(
    client: Client, workers: Workers, queue: str, lookup: Path, cache_mb: float
) -> None:
    workers.start(lookup, config=f"{{result_cache_mb: {cache_mb}, batch: {{max_items: 64}}}}")
    asked = 0

    @given(st.lists(BODIES, min_size=1, max_size=80))
    @settings(max_examples=40, deadline=None)
    def check(bodies: list[dict[str, Any]]) -> None:
        nonlocal asked
        asked += len(bodies)
        results = client.score_many(queue, bodies, timeout_s=60)
        found = [(result.error and result.error[0], result.value) for result in results]
        assert found == [expected(body) for body in bodies]
        assert [result.tokens for result in results if result.ok] == [
            len(body["tensors"]["ids"]) for body in bodies if expected(body)[0] is None
        ]
        assert len({result.id for result in results}) == len(bodies)
        assert not any(result.cached for result in results if not cache_mb or not result.ok)

    check()
    counted = counters(client, queue, asked)
    assert counted["deduplicated"] > 0
    assert counted["dropped"] == 0
    assert (counted["cache_hits"] > 0) == (cache_mb > 0)


def test_equal_requests_of_a_window_run_once_and_each_has_its_own_result(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    texts = ["the mill", "the river"] * 50
    ids = client.submit_many(queue, texts)
    ids += client.submit_many(queue, texts[:2], options={"top_k": 3})
    workers.start(tiny_classifier)  # all of them are one window
    results = [client.result(each, timeout_s=60) for each in ids]
    counted = counters(client, queue, 102)
    assert [result.id for result in results] == ids
    assert (counted["requests"], counted["deduplicated"]) == (102, 98)
    assert counted["tokens"] == 2 * sum(
        result.tokens or 0 for result in results[:2]
    )  # two texts, two options
    assert results[0].value != results[1].value
    assert [result.value for result in results[:100]] == [results[0].value, results[1].value] * 50
    assert [len(result.value) for result in results[100:]] == [3, 3]
    assert all(result.timing_ms["queued"] > 0 and result.timing_ms["run"] > 0 for result in results)
    assert all(result.attempts == 1 and result.batch and not result.cached for result in results)


def test_what_is_wrong_with_one_is_wrong_with_all_its_equals(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    odd = ["oats", "barley", "it may explode", " "]
    ids = client.submit_many(queue, [*odd * 3, "the mill"])
    workers.start(tiny_classifier, config="{retry: {backoff_s: 0.05}}", program=FAULTY)
    results = [client.result(each, timeout_s=60) for each in ids]
    codes = ["engine_error", "engine_error", "bad_request", "empty_input"]
    assert [result.error and result.error[0] for result in results] == [*codes * 3, None]
    assert [result.attempts for result in results] == [*[1, 3, 1, 1] * 3, 1]


def test_one_that_is_cancelled_or_too_late_takes_no_equal_one_along(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    late = client.submit(queue, "the mill", deadline_s=0.05)
    first, cancelled, last = client.submit_many(queue, ["the mill"] * 3)
    client.cancel(queue, cancelled)
    time.sleep(0.06)
    workers.start(tiny_classifier)
    results = [client.result(each, timeout_s=60) for each in (late, first, cancelled, last)]
    assert [each.status for each in results] == [Status.EXPIRED, Status.OK, Status.CANCELLED, Status.OK]


@pytest.mark.parametrize("model", ["tiny_classifier", "tiny_encoder"])
def test_a_known_answer_is_given_again_and_says_so(
    client: Client, redis: Redis, workers: Workers, queue: str, model: str, request: pytest.FixtureRequest
) -> None:
    workers.start(request.getfixturevalue(model), config=CACHE)
    text = "the wheel turns " * 40  # more tokens than the model takes
    first, again, other, bad, bad_again = (
        client.result(client.submit(queue, each), timeout_s=60) for each in (text, text, "the river", "", "")
    )
    assert again.value == first.value
    assert (again.tokens, again.truncated, again.attempts) == (first.tokens, True, 1)
    assert [each.cached for each in (first, again, other, bad, bad_again)] == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert (again.batch, again.timing_ms["run"]) == (None, 0)
    counted = counters(client, queue, 5)
    assert (counted["cache_hits"], counted["cache_misses"]) == (1, 4)
    stored = [json.loads(redis.get(keys.result(queue, each.id)) or b"") for each in (first, again)]
    assert ["cached" in record for record in stored] == [False, True]


def test_answers_of_other_options_are_others(
    client: Client, workers: Workers, queue: str, tiny_encoder: Path
) -> None:
    workers.start(tiny_encoder, config=CACHE)
    for _ in range(2):
        as_list = client.score(queue, "the mill")
        as_text = client.score(queue, "the mill", options={"encoding": "base64"})
        assert isinstance(as_list, list)
        assert isinstance(as_text, dict)
    assert counters(client, queue, 4)["cache_hits"] == 2


def test_bodies_are_equal_as_json_and_by_nothing_less() -> None:
    equal = [b'{"text": "a", "options": {"top_k": 1, "truncate": true}}']
    equal += [b'{"options":{"truncate":true,"top_k":1},"text":"\\u0061"}']
    others = [b'{"text":"a"}', b'{"text":"a","options":{"top_k":true,"truncate":true}}']
    others += [b'{"text":"a","options":{"top_k":1.0,"truncate":true}}', b'{"text":"a","pair":"a"}']
    others += [b'{"text":"a","other":1}', b'{"a":' * 600 + b"1" + b"}" * 600]  # too deep to be written
    parted = Sharing().part([job(body) for body in (*equal, *others)])
    assert [each.request.body for each in parted.to_run] == [equal[0], *others]
    assert [each.request.body for each in parted.to_run[0].twins] == equal[1:]
    assert parted.twins == 1


def test_what_was_delivered_before_is_nobodys_twin_but_may_be_known() -> None:
    sharing = Sharing(1 << 20)
    body = b'{"text":"a"}'
    jobs = [job(body, 2), job(body), job(body), job(body, 3)]
    parted = sharing.part(jobs)
    assert parted.to_run == [jobs[0], jobs[1], jobs[3]]
    assert jobs[1].twins == [jobs[2]]
    sharing.keep(jobs[1], [1, 2])
    assert [each for each, _ in sharing.part([job(body, 2)]).known]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), max_size=6))
def test_who_has_time_left_takes_the_place_of_an_equal_one_that_is_late(groups: list[list[bool]]) -> None:
    jobs = []
    for group in groups:  # whether each is late
        first, *twins = [job(b"{}", deadline_ms=1 if late else None) for late in group]
        first.twins = twins
        jobs.append(first)
    kind = {id(each): number for number, first in enumerate(jobs) for each in everyone((first,))}
    all_of_them = list(everyone(jobs))
    in_time, late = part_late(jobs)
    assert {id(each) for each in late} == {id(each) for each in all_of_them if each.is_late()}
    left = list(everyone(in_time))
    assert {id(each) for each in left} == {id(each) for each in all_of_them} - {id(each) for each in late}
    assert len(left) + len(late) == len(all_of_them)
    assert all(kind[id(twin)] == kind[id(first)] for first in in_time for twin in first.twins)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=1), st.integers(0, 900)), max_size=200))
def test_the_bound_holds_and_the_least_recently_used_go_first(steps: list[tuple[bool, bytes, int]]) -> None:
    bound = 3000
    answers, model = Answers(bound), OrderedDict[bytes, Answer]()
    for writes, digest, size in steps:
        if writes:
            model[digest] = answer = Answer(b"x" * size, 1, truncated=False)
            model.move_to_end(digest)
            answers.put(digest, answer)
            while sum(len(each.json) + ENTRY_BYTES for each in model.values()) > bound:
                model.popitem(last=False)
        else:
            assert answers.get(digest) == model.get(digest)
            if digest in model:
                model.move_to_end(digest)
        assert answers.used_bytes <= bound
        assert len(answers) == len(model)


def test_an_answer_larger_than_all_room_is_not_kept() -> None:
    answers = Answers(1000)
    answers.put(b"a", Answer(b"x", 1, truncated=False))
    answers.put(b"b", Answer(b"x" * 1000, 1, truncated=False))
    assert answers.get(b"b") is None
    assert answers.get(b"a")


@pytest.mark.parametrize("size", [10, 8000])
def test_the_memory_that_is_counted_is_the_memory_that_is_taken(size: int) -> None:
    sharing = Sharing(1 << 30)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20_000_000 // (size + 1000)):
            asked = job(orjson.dumps({"text": f"text {number}"}))
            sharing.part([asked])
            sharing.keep(asked, "x" * size)
        del asked
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 < taken / sharing.answers.used_bytes < 1.0


def test_only_what_is_cached_says_so() -> None:
    assert b"cached" not in wire.encode_result(Result("a", "ok"))
    assert wire.decode_result(wire.encode_result(Result("a", "ok", cached=True))).cached
