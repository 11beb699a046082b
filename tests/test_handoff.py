"""Planned windows between two threads: what is held, what goes first, and that each batch runs once."""

from __future__ import annotations

import random
import threading

import numpy as np

from conftest import wait_until
from gristmill.wire import Request
from gristmill_worker.handoff import HELD_WINDOWS, Handoff
from gristmill_worker.jobs import Batch, Job
from gristmill_worker.sources.base import Delivery


def batch(number: int, priority: str = "default") -> Batch:
    job = Job(Delivery(b"1-0", {}, 1, priority), Request("r", b"{}"))
    return Batch([job], (1, 1), {"number": np.array(number)})


def number_of(each: Batch) -> int:
    return int(each.inputs["number"])


class Runner(threading.Thread):
    """The second thread: notes what has run; a batch may run for each ``steps.release()``."""

    def __init__(self, handoff: Handoff, steps: int) -> None:
        super().__init__(daemon=True)
        self.ran: list[int] = []
        self.steps = threading.Semaphore(steps)
        self._handoff = handoff

    def run(self) -> None:
        for each in self._handoff.batches():
            self.steps.acquire()
            self.ran.append(number_of(each))


MANY = 100_000


def test_no_more_windows_are_held_than_there_are_places() -> None:
    handoff = Handoff()
    for number in range(HELD_WINDOWS):
        assert handoff.reserve(0)
        handoff.pass_on([batch(number)])
    assert not handoff.reserve(0.01)
    runner = Runner(handoff, MANY)
    runner.start()
    assert handoff.reserve(60)
    handoff.give_back()
    handoff.wait_until_idle()
    assert runner.ran == [0, 1]
    assert handoff.reserve(0)
    assert handoff.is_idle()
    handoff.close()
    runner.join()


def test_what_is_urgent_runs_after_the_batch_of_now_and_is_waited_for() -> None:
    handoff = Handoff()
    for window in range(HELD_WINDOWS):
        handoff.reserve(60)
        handoff.pass_on([batch(10 * window + i) for i in range(5)])
    runner = Runner(handoff, 2)
    runner.start()
    wait_until(lambda: runner.ran == [0, 1])  # the third is at it
    urgent = threading.Thread(target=handoff.run_first, args=([batch(100), batch(101)],))
    urgent.start()
    wait_until(lambda: len(handoff._urgent) == 3)
    runner.steps.release(2)
    wait_until(lambda: runner.ran == [0, 1, 2, 100])
    assert urgent.is_alive()
    runner.steps.release(MANY)
    urgent.join()
    handoff.close()
    runner.join()
    assert runner.ran == [0, 1, 2, 100, 101, 3, 4, 10, 11, 12, 13, 14]


def test_it_is_known_whether_a_window_with_high_priority_is_held() -> None:
    handoff = Handoff()
    runner = Runner(handoff, 0)
    runner.start()
    for priority, high in (("low", False), ("high", True)):
        handoff.reserve(60)
        handoff.pass_on([batch(0, priority)])
        assert handoff.holds_high() is high
    runner.steps.release(2)
    handoff.wait_until_idle()
    assert not handoff.holds_high()
    handoff.close()
    runner.join()


def test_in_any_order_of_events_all_run_once_and_urgent_ones_have_run_when_they_are_waited_for() -> None:
    chooser = random.Random(3)
    handoff = Handoff()
    runner = Runner(handoff, MANY)
    runner.start()
    number = 0
    for _ in range(3000):
        some = [batch(number + i) for i in range(chooser.randint(0, 3))]
        number += len(some)
        if chooser.random() < 0.5:
            handoff.run_first(some)
            assert {number_of(each) for each in some} <= set(runner.ran[-10 * HELD_WINDOWS :])
        else:
            handoff.reserve(60)
            handoff.pass_on(some)
    handoff.wait_until_idle()
    handoff.close()
    runner.join()
    assert sorted(runner.ran) == list(range(number))
