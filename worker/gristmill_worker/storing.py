"""Storing results, however long Redis is away, and whatever it refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from gristmill.errors import BrokerUnavailable
from gristmill_worker.jobs import Judge
from gristmill_worker.sources.base import Outcome, Source
from gristmill_worker.telemetry import logger
from gristmill_worker.vitals import Vitals

BACKOFF_S: Final = 0.1, 2.0
REFUSALS: Final = 5  # in a row, by a Redis that answers otherwise
LAST_TRY_S: Final = 5.0  # for storing results after the stop signal while Redis is away
FINISHED_TOGETHER: Final = 256  # requests
FINISHED_AT_MOST: Final = 2 * FINISHED_TOGETHER  # one batch may answer a whole window of equal requests


class Storing:
    """For one worker; its methods may be called by all threads of the loop."""

    def __init__(self, source: Source, judge: Judge, vitals: Vitals, stop: threading.Event) -> None:
        self._source = source
        self._judge = judge
        self._vitals = vitals
        self._stop = stop
        self._outage = ""  # the last error of Redis that was logged
        self._gave_up = False  # after the stop signal

    def store(self, outcomes: Sequence[Outcome], *, substituted: bool = False) -> None:
        """Store results, however long Redis is away: what ran is not thrown away.

        What Redis refuses is stored one by one, and the one that it refuses alone as an error.
        """
        if not outcomes:
            return
        if len(outcomes) > FINISHED_AT_MOST:
            for start in range(0, len(outcomes), FINISHED_TOGETHER):
                self.store(outcomes[start : start + FINISHED_TOGETHER])
            return
        give_up, refusals = None, 0
        while True:
            try:
                finished = self._source.finish(outcomes)
                break
            except BrokerUnavailable as error:
                # Too large a command is often not answered, its connection just ends: while Redis is there
                # all the time, and only this fails again and again, it is a refusal.
                waits = error.denied or error.unwilling or not self._source.reachable()
                refusals = 0 if waits else refusals + 1
                if refusals >= REFUSALS and not substituted:
                    for outcome in outcomes:
                        single = [outcome] if len(outcomes) > 1 else [self._judge.not_stored(outcome, error)]
                        self.store(single, substituted=len(outcomes) == 1)
                    return
                if self._stop.is_set():
                    give_up = give_up or time.monotonic() + LAST_TRY_S
                    if self._gave_up or time.monotonic() > give_up:
                        self._gave_up = True
                        logger().error("results_not_stored", requests=len(outcomes), error=str(error))
                        return  # the entries stay pending: another worker takes them over
                self.wait_for_redis(error)
        self.reached_redis()
        self._vitals.finished(outcomes)
        failed = sum(1 for outcome in outcomes if outcome.result is None or not outcome.result.ok)
        self._vitals.counters.add(requests=finished, errors=failed, dropped=len(outcomes) - finished)

    def reached_redis(self) -> None:
        """Note that Redis answers."""
        self._outage = ""
        self._vitals.redis_up = True

    def wait_for_redis(self, error: BrokerUnavailable) -> None:
        """Pause after an error, and log it once for each outage."""
        self._vitals.redis_up = False
        self._vitals.move()  # it is not the loop that hangs
        if self._outage != str(error):
            self._outage = str(error)
            logger().warning("redis_unavailable", error=self._outage)
        time.sleep(BACKOFF_S[1] if error.denied else BACKOFF_S[0])
