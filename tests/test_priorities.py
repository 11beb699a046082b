"""Priorities: what is read when, that nothing starves, and that every path knows of all streams."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from conftest import Server, Workers, wait_until
from gristmill import BrokerUnavailable, Client, InvalidRequestError, QueueFull, Result, keys, wire
from gristmill.core import Depth
from gristmill.driver import Connections
from gristmill.errors import ErrorCode, ExitCode
from gristmill_worker.sources.base import Delivery, Outcome
from gristmill_worker.sources.reading import LOW_FIRST
from gristmill_worker.sources.streams import StreamSource
from test_cli import gristmill

FAULTY = (str(Path(__file__).with_name("faulty_worker.py")),)


@pytest.fixture
def source(own_redis: Server, queue: str) -> Iterator[StreamSource]:
    """A worker's view of the queue, without an engine."""
    made = StreamSource(own_redis.url, queue, "w0", lease_s=30.0, result_ttl_s=60)
    yield made
    made.leave()


def fill(client: Client, queue: str, **counts: int) -> None:
    for priority, count in counts.items():
        client.submit_many(queue, ["bread"] * count, priority=priority)


def finish(source: StreamSource, window: list[Delivery]) -> None:
    results = [Result(each.fields[b"id"].decode(), "ok", value=1) for each in window]
    assert source.finish([Outcome(*pair) for pair in zip(window, results, strict=True)]) == len(window)


def kinds(window: list[Delivery]) -> dict[str, int]:
    return dict(Counter(each.priority for each in window))


def test_a_backlog_is_read_in_the_order_of_priority_and_never_above_the_window(
    own_client: Client, source: StreamSource, queue: str
) -> None:
    assert source.take(8, 0.01) == []
    fill(own_client, queue, low=100, default=100, high=18)
    windows = [source.take(8, 0.01) for _ in range(6)]
    assert all(len(window) == 8 for window in windows)
    # The first window of a worker that was idle has a part of each; from then on it knows of a backlog.
    assert [kinds(window) for window in windows[1:]] == [
        {"high": 8},
        {"high": 6, "default": 2},
        {"default": 8},
        {"default": 8},
        {"default": 8},
    ]
    assert min(kinds(windows[0]).values()) >= 2


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_low_is_answered_although_high_never_ends(
    own_client: Client, source: StreamSource, queue: str, size: int
) -> None:
    assert source.take(size, 0.01) == []
    for priority in ("high", "default"):
        fill(own_client, queue, **{priority: 10 * size})
    source.take(size, 0.01)  # the backlog is there before the low one
    own_client.submit(queue, "bread", id="patient", priority="low")
    windows, window = 0, list[Delivery]()
    while "low" not in kinds(window):
        windows += 1
        fill(own_client, queue, high=size, default=size)
        window = source.take(size, 0.01)
        assert len(window) == size
        finish(source, window)
    assert windows <= LOW_FIRST
    assert own_client.result("patient", queue=queue).ok


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_low_is_answered_although_high_that_goes_before_all_never_ends(
    own_client: Client, source: StreamSource, queue: str, size: int
) -> None:
    assert source.take(size, 0.01) == []
    fill(own_client, queue, high=10 * size, default=10 * size)
    source.take(size, 0.01)
    own_client.submit(queue, "bread", id="patient", priority="low")
    windows, window = 0, list[Delivery]()
    while "low" not in kinds(window):
        windows += 1
        fill(own_client, queue, high=size, default=size)
        window = source.take_urgent(size, high=True) or source.take(size, 0.01)
        assert len(window) == size
        finish(source, window)
    assert windows <= LOW_FIRST + 1
    assert own_client.result("patient", queue=queue).ok


def test_a_few_of_high_priority_are_not_a_window(
    own_client: Client, source: StreamSource, queue: str
) -> None:
    assert source.take(8, 0.01) == []
    assert source.take_urgent(8, high=True) == []
    fill(own_client, queue, default=9)
    for _ in range(40):  # five windows' worth
        fill(own_client, queue, high=1)
        window = source.take_urgent(8, high=True)
        assert kinds(window) == {"high": 1}
        finish(source, window)
    own_client.pause(queue)
    fill(own_client, queue, high=1)
    source.take_urgent(8, high=True)  # it learns of the pause
    fill(own_client, queue, high=1)
    assert source.take_urgent(8, high=True) == []


@pytest.mark.parametrize("count", [64, 128], ids=["one window, and a place is free", "two windows"])
def test_high_goes_before_the_windows_that_a_busy_worker_holds(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path, count: int
) -> None:
    config = "{batch: {max_items: 64, shapes: [[1, 48]]}}"  # 64 batches a window, a tenth of a second each
    workers.start(tiny_classifier, config=config, program=FAULTY)
    ids = client.submit_many(queue, [f"slow {i}" for i in range(count)])
    wait_until(lambda: client.depth(queue).pending > count - 32)
    assert client.score(queue, "bread", priority="high")
    assert client.depth(queue).pending > count - 60
    assert all(client.result(request_id).ok for request_id in ids)


def test_high_does_not_go_before_its_like(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    config = "{batch: {max_items: 16, shapes: [[1, 48]]}}"
    workers.start(tiny_classifier, config=config, program=FAULTY)
    ids = client.submit_many(queue, [f"slow {i}" for i in range(64)], priority="high")
    started = [client.result(request_id).timing_ms["queued"] for request_id in ids]
    windows = [min(started[at : at + 16]) for at in range(0, 64, 16)]
    assert windows == sorted(windows)
    assert all(
        max(started[at : at + 16]) <= min(started[at + 16 : at + 32]) for at in range(0, 48, 16)
    )  # whole windows, one after the other


def test_what_was_read_before_an_error_comes_again(
    own_client: Client, own_redis: Server, source: StreamSource, queue: str
) -> None:
    """Nobody calls recover() for an error while a window lingers: the source does it itself."""
    assert source.take(4, 0.01) == []
    fill(own_client, queue, high=6, default=5)
    assert len(source.take(4, 0.01)) == 4
    with Redis.from_url(own_redis.url) as redis:
        redis.xgroup_destroy(keys.requests(queue), keys.GROUP)
    with pytest.raises(BrokerUnavailable):
        source.take(8, 0.0)  # after it has read what high had left
    again = [source.take(8, 0.01) for _ in range(3)]
    assert [[(each.priority, each.deliveries) for each in window] for window in again] == [[("high", 2)]] * 3


def test_an_idle_worker_gets_what_comes_in_one_window(
    own_client: Client, source: StreamSource, queue: str
) -> None:
    assert source.take(64, 0.01) == []
    fill(own_client, queue, default=50)
    assert len(source.take(64, 1.0)) == 50
    fill(own_client, queue, high=10, default=30, low=30)
    assert kinds(source.take(64, 1.0)) == {"high": 10, "default": 30, "low": 24}


def test_the_bound_counts_all_priorities(own_redis: Server, queue: str) -> None:
    with Client(own_redis.url, max_length=3) as client:
        fill(client, queue, high=1, default=1, low=1)
        for priority in keys.PRIORITIES:
            with pytest.raises(QueueFull):
                client.submit(queue, "bread", priority=priority)
        assert client.depth(queue) == Depth(waiting=3, pending=0, dead=0, max_length=3)
        with pytest.raises(InvalidRequestError, match="high, default, low"):
            client.submit(queue, "bread", priority="urgent")
        with pytest.raises(InvalidRequestError, match="high, default, low"):
            client.score_many(queue, ["bread"], priority="urgent")


def test_renewal_takeover_and_own_entries_know_all_streams(
    own_client: Client, own_redis: Server, queue: str
) -> None:
    fill(own_client, queue, high=2, default=2, low=2)
    dead = StreamSource(own_redis.url, queue, "dead", lease_s=1.0, result_ttl_s=60)
    heir = StreamSource(own_redis.url, queue, "heir", lease_s=1.0, result_ttl_s=60)
    held = dead.take(6, 0.1)
    assert kinds(held) == {"high": 2, "default": 2, "low": 2}
    other = Connections(own_redis.url)  # as in the thread that renews
    for _ in range(5):
        time.sleep(0.4)
        dead.renew(other)
        assert heir.take(6, 0.01) == []  # the leases are renewed on all streams
    other.close()
    taken: list[Delivery] = []
    ends = time.monotonic() + 30
    while len(taken) < 6:
        assert time.monotonic() < ends
        window = heir.take(6, 0.05)
        assert len(window) <= 1  # what was delivered before comes alone
        taken += window
    assert kinds(taken) == kinds(held)
    assert {each.deliveries for each in taken} == {2}
    heir.release(taken)
    again = [heir.take(6, 0.05)[0] for _ in range(6)]
    assert {each.deliveries for each in again} == {3}
    dead_letters = [each.fields[b"id"].decode() for each in again if each.priority == "low"]
    error = (ErrorCode.DEAD_LETTERED, "given up")
    outcomes = [
        Outcome(each, Result(each.fields[b"id"].decode(), "error", error=error), reason="max_deliveries")
        for each in again
        if each.priority == "low"
    ]
    assert heir.finish(outcomes) == 2
    finish(heir, [each for each in again if each.priority != "low"])
    assert [letter.priority for letter in own_client.dead_letters(queue)] == ["low", "low"]
    assert own_client.retry_dead(queue, dead_letters) == dict.fromkeys(dead_letters, "queued")
    assert kinds(heir.take(6, 0.1)) == {"low": 2}  # a retry keeps the priority
    heir.leave()
    dead.leave()
    with Redis.from_url(own_redis.url, protocol=2) as redis:
        for stream in keys.streams(queue):
            names = [c["name"] for c in redis.execute_command("XINFO CONSUMERS", stream, keys.GROUP)]
            assert names == ([b"heir"] if stream.endswith(":low") else [])


def test_all_priorities_are_answered_by_a_worker(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, url=own_redis.url)
    for priority in keys.PRIORITIES:
        assert own_client.score(queue, "bread", priority=priority)
        assert all(result.ok for result in own_client.score_many(queue, ["bread"] * 300, priority=priority))
    wait_until(lambda: own_client.depth(queue) == Depth(0, 0, 0, 100_000))


def test_a_worker_that_knows_the_default_stream_only_goes_on(
    own_client: Client, own_redis: Server, source: StreamSource, queue: str
) -> None:
    source.take(8, 0.01)
    fill(own_client, queue, high=1, default=3)
    stream = keys.requests(queue)
    with Redis.from_url(own_redis.url, protocol=2) as redis:
        old = ("XREADGROUP", "GROUP", keys.GROUP, "old", "COUNT", 2, "STREAMS", stream, ">")
        ((_, entries),) = redis.execute_command(*old)
        for entry_id, fields in entries:
            assert redis.xack(stream, keys.GROUP, entry_id) == 1
            request_id = fields[b"id"].decode()
            redis.set(keys.result(queue, request_id), wire.encode_result(Result(request_id, "ok")))
            redis.xdel(stream, entry_id)
    assert kinds(source.take(8, 0.1)) == {"high": 1, "default": 1}


def test_the_command_line_submits_and_scores_with_a_priority(
    own_client: Client, own_redis: Server, workers: Workers, queue: str, tiny_classifier: Path, tmp_path: Path
) -> None:
    url = own_redis.url
    assert gristmill("submit", queue, "bread", "--priority", "low", "--id", "a", url=url).returncode == 0
    assert gristmill("submit", queue, "bread", "--priority", "urgent", url=url).returncode == ExitCode.USAGE
    with Redis.from_url(url) as redis:
        assert [redis.xlen(stream) for stream in keys.streams(queue)] == [0, 0, 1]
    workers.start(tiny_classifier, url=url)
    assert own_client.result("a", queue=queue).ok
    source = tmp_path / "in.csv"
    source.write_text("text\nbread\nmill\n")
    command = ("score", source, "--out", tmp_path / "out.csv", "--text-column", "text", "--queue", queue)
    assert gristmill(*command, "--priority", "high", url=url).returncode == 0
    with Redis.from_url(url, protocol=2) as redis:
        added = [redis.execute_command("XINFO STREAM", stream) for stream in keys.streams(queue)]
    assert [info["last-generated-id"] != b"0-0" for info in added] == [True, False, True]
