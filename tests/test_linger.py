"""A window closes at N requests, or when its oldest has waited T."""

import time

from gristmill_worker.batching.linger import IDLE_S, drain
from gristmill_worker.sources.base import Delivery


class Backlog:
    """A list of deliveries with a log of what was asked of it."""

    def __init__(self, count: int, age_s: float) -> None:
        born_ms = int((time.time() - age_s) * 1000)
        self.left = [Delivery(b"%d-%d" % (born_ms, i), {}, 1) for i in range(count)]
        self.asked: list[tuple[int, float]] = []

    def take(self, count: int, block_s: float) -> list[Delivery]:
        self.asked.append((count, block_s))
        taken, self.left = self.left[:count], self.left[count:]
        return taken


def test_a_full_window_is_returned_at_once() -> None:
    backlog = Backlog(100, age_s=0)
    assert len(drain(backlog.take, 32, 10.0)) == 32
    assert backlog.asked == [(32, IDLE_S)]


def test_an_old_request_waits_no_more() -> None:
    backlog = Backlog(3, age_s=60)
    assert len(drain(backlog.take, 32, 10.0)) == 3
    assert backlog.asked == [(32, IDLE_S)]


def test_a_young_request_waits_for_others() -> None:
    backlog = Backlog(1, age_s=0)
    started = time.monotonic()
    assert len(drain(backlog.take, 32, 0.05)) == 1
    assert time.monotonic() - started >= 0.04
    assert {count for count, _ in backlog.asked[1:]} == {31}
    assert all(block_s == 0 for _, block_s in backlog.asked[1:])


def test_a_clock_that_is_behind_does_not_prolong_the_wait() -> None:
    backlog = Backlog(1, age_s=-3600)
    started = time.monotonic()
    drain(backlog.take, 32, 0.05)
    assert time.monotonic() - started < 30


def test_without_a_wait_one_look_is_enough() -> None:
    backlog = Backlog(1, age_s=0)
    assert len(drain(backlog.take, 32, 0.0)) == 1
    assert len(backlog.asked) == 1


def test_an_empty_queue_gives_an_empty_window() -> None:
    assert drain(Backlog(0, age_s=0).take, 32, 1.0) == []
