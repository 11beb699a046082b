"""Planned windows between two threads: what is held, what goes first, and that each batch runs once."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np

from gristmill_worker.handoff import HELD_WINDOWS, Handoff
from gristmill_worker.jobs import Batch


def batch(number: int) -> Batch:
    return Batch([], (1, 1), {"number": np.array(number)})


def number_of(each: Batch) -> int:
    return int(each.inputs["number"])


class Runner(threading.Thread):
    """The second thread: notes what has run."""

    def __init__(self, handoff: Handoff, pause_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.ran: list[int] = []
        self._handoff = handoff
        self._pause_s = pause_s

    def run(self) -> None:
        for each in self._handoff.batches():
            time.sleep(self._pause_s)
            self.ran.append(number_of(each))


def test_no_more_windows_are_held_than_there_are_places() -> None:
    handoff = Handoff()
    for number in range(HELD_WINDOWS):
        assert handoff.reserve(0)
        handoff.pass_on([batch(number)])
    assert not handoff.reserve(0.01)
    runner = Runner(handoff)
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
    windows: list[Any] = [[batch(10 * window + i) for i in range(5)] for window in range(HELD_WINDOWS)]
    for window in windows:
        handoff.reserve()
        handoff.pass_on(window)
    runner = Runner(handoff, 0.05)
    runner.start()
    while not runner.ran:
        time.sleep(0.001)
    handoff.run_first([batch(100), batch(101)])
    at = runner.ran.index(100)
    assert at < 4
    assert runner.ran[at : at + 2] == [100, 101]
    handoff.close()
    runner.join()
    assert [number for number in runner.ran if number < 100] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


def test_in_any_order_of_events_all_run_once_and_urgent_ones_have_run_when_they_are_waited_for() -> None:
    chooser = random.Random(3)
    handoff = Handoff()
    runner = Runner(handoff)
    runner.start()
    number = 0
    for _ in range(3000):
        some = [batch(number + i) for i in range(chooser.randint(0, 3))]
        number += len(some)
        if chooser.random() < 0.5:
            handoff.run_first(some)
            assert {number_of(each) for each in some} <= set(runner.ran[-10 * HELD_WINDOWS :])
        else:
            handoff.reserve()
            handoff.pass_on(some)
    handoff.wait_until_idle()
    handoff.close()
    runner.join()
    assert sorted(runner.ran) == list(range(number))
