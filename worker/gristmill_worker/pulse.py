"""The worker's second thread: leases, heartbeat and a look at the neighbours, even while the engine runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from gristmill.driver import ERRORS, Connections
from gristmill.errors import BrokerUnavailable
from gristmill_worker.sources.advice import advise
from gristmill_worker.sources.base import ServedSource
from gristmill_worker.sources.takeover import LOOK_S
from gristmill_worker.telemetry import logger

BEAT_S: Final = 2.0


class Pulse(threading.Thread):
    """Renews every third of a lease at the latest; the heartbeat outlives three missed beats."""

    def __init__(
        self, source: ServedSource, url: str, lease_s: float, fields: Callable[[], Mapping[str, str]]
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self._source = source
        self._redis = Connections(url)  # its own: the loop's may be blocked in a read
        self._every_s = min(BEAT_S, lease_s / 3)
        self._fields = fields
        self._done = threading.Event()

    def run(self) -> None:
        beat_at = 0.0
        advised = False
        while True:
            try:
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self._every_s - LOOK_S / 2
                    self._source.renew(self._redis)
                    self._source.beat(self._redis, self._fields(), ttl_s=max(2, int(self._every_s * 4)))
                self._source.look(self._redis)
                if not advised:
                    advised = True
                    advise(self._redis)
            except (BrokerUnavailable, *ERRORS):
                beat_at = 0.0  # the loop reports it
            except Exception:  # noqa: BLE001 - without renewal others would take over what runs here
                logger().exception("pulse_failed")
            if self._done.wait(min(LOOK_S, self._every_s)):
                break
        self._redis.close()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._done.set()
        self.join()
