"""The worker's second thread: renews leases and writes the heartbeat while the engine is busy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

from gristmill.errors import BrokerUnavailable
from gristmill_worker.sources.streams import StreamSource, connect
from gristmill_worker.telemetry import logger

BEAT_S: Final = 2.0


class Pulse(threading.Thread):
    """Renews every third of a lease at the latest; the heartbeat outlives three missed beats."""

    def __init__(
        self, source: StreamSource, url: str, lease_s: float, fields: Callable[[], Mapping[str, str]]
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self._source = source
        self._redis = connect(url)  # its own: the loop's may be blocked in a read
        self._every_s = min(BEAT_S, lease_s / 3)
        self._fields = fields
        self._done = threading.Event()

    def run(self) -> None:
        while True:
            try:
                self._source.renew(self._redis)
                self._source.beat(self._redis, self._fields(), ttl_s=max(2, int(self._every_s * 4)))
            except BrokerUnavailable:
                pass  # the loop reports it
            except Exception:  # noqa: BLE001 - without renewal others would take over what runs here
                logger().exception("pulse_failed")
            if self._done.wait(self._every_s):
                break
        self._redis.close()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._done.set()
        self.join()
