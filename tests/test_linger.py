"""A window closes at N requests, or when its oldest has waited T."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from conftest import Workers
from gristmill import Client
from gristmill_worker.batching.linger import IDLE_S, Bounds, drain
from gristmill_worker.sources.base import Delivery

BOUNDS = Bounds(32, 32_000, 1000)  # bytes do not count


class Backlog:
    """A list of deliveries with a log of what was asked of it."""

    def __init__(self, count: int, age_s: float, sizes: Sequence[int] = ()) -> None:
        born_ms = int((time.time() - age_s) * 1000)
        bodies = [b"x" * size for size in sizes] or [b""] * count
        self.left = [Delivery(b"%d-%d" % (born_ms, i), {b"body": each}, 1) for i, each in enumerate(bodies)]
        self.asked: list[tuple[int, float]] = []

    def take(self, count: int, block_s: float) -> list[Delivery]:
        self.asked.append((count, block_s))
        taken, self.left = self.left[:count], self.left[count:]
        return taken


def test_a_full_window_is_returned_at_once() -> None:
    backlog = Backlog(100, age_s=0)
    assert len(drain(backlog.take, BOUNDS, 10.0)) == 32
    assert backlog.asked == [(32, IDLE_S)]


def test_an_old_request_waits_no_more() -> None:
    backlog = Backlog(3, age_s=60)
    assert len(drain(backlog.take, BOUNDS, 10.0)) == 3
    assert backlog.asked == [(32, IDLE_S)]


def test_a_young_request_waits_for_others() -> None:
    backlog = Backlog(1, age_s=0)
    started = time.monotonic()
    assert len(drain(backlog.take, BOUNDS, 0.05)) == 1
    assert time.monotonic() - started >= 0.04
    assert {count for count, _ in backlog.asked[1:]} == {31}
    assert all(block_s == 0 for _, block_s in backlog.asked[1:])


def test_a_clock_that_is_behind_does_not_prolong_the_wait() -> None:
    backlog = Backlog(1, age_s=-3600)
    started = time.monotonic()
    drain(backlog.take, BOUNDS, 0.05)
    assert time.monotonic() - started < 30


def test_without_a_wait_one_look_is_enough() -> None:
    backlog = Backlog(1, age_s=0)
    assert len(drain(backlog.take, BOUNDS, 0.0)) == 1
    assert len(backlog.asked) == 1


def test_an_empty_queue_gives_an_empty_window() -> None:
    assert drain(Backlog(0, age_s=0).take, BOUNDS, 1.0) == []


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(1, 40), st.integers(1, 3000))
def test_a_window_holds_no_more_bytes_than_it_may_and_is_filled_where_they_are_small(
    sizes: list[int], max_items: int, max_bytes: int
) -> None:
    backlog = Backlog(0, age_s=60, sizes=sizes)
    window = drain(backlog.take, Bounds(max_items, max_bytes, 100), 0.0)
    held = [len(each.fields[b"body"]) for each in window]
    assert held == sizes[: len(held)]
    assert 1 <= len(held) <= max_items
    assert sum(held) <= max_bytes or len(held) == 1
    # It ends where the queue does, at N, or where one more of the largest size would be too much.
    assert len(held) in {len(sizes), max_items} or sum(held) + 100 > max_bytes


def test_bytes_cost_a_read_only_where_they_could_be_too_many() -> None:
    backlog = Backlog(0, age_s=60, sizes=[10] * 100)
    assert len(drain(backlog.take, Bounds(32, 1600, 100), 10.0)) == 32
    assert [count for count, _ in backlog.asked] == [16, 14, 2]


def test_a_worker_takes_large_requests_in_small_windows(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    ids = client.submit_many(queue, [f"{i} " + "mill " * 100_000 for i in range(20)])  # of 0.5 MB
    workers.start(tiny_classifier, config="{batch: {max_bytes: 2097152}}")
    results = [client.result(each, timeout_s=60) for each in ids]
    assert all(result.ok for result in results)
    windows = Counter(result.timing_ms["encode"] for result in results)  # one time for each window
    assert max(windows.values()) == 3  # where the first two leave room for one of any size
