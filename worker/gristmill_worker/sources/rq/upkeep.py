"""What RQ's workers do beside jobs: clean the registries, and bring scheduled jobs back to the queue."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Final

from rq.defaults import DEFAULT_RESULT_TTL
from rq.scheduler import RQScheduler

from gristmill.driver import ERRORS
from gristmill_worker.sources.rq.payload import Json
from gristmill_worker.sources.rq.registration import rq_worker
from gristmill_worker.sources.streams import connect
from gristmill_worker.telemetry import logger

EVERY_S: Final = 1.0


class Upkeep:
    """A thread with connections of its own, as RQ's code for this may take a while."""

    def __init__(self, url: str, queue: str, name: str, *, scheduler: bool) -> None:
        self._client = connect(url)
        self._worker = rq_worker(self._client, queue, name, DEFAULT_RESULT_TTL)
        self._scheduler = (
            RQScheduler([queue], connection=self._client, serializer=Json, logging_level="WARNING")
            if scheduler
            else None
        )
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join(EVERY_S)
        self._client.close()
        self._client.connection_pool.disconnect()
        if self._scheduler is not None:
            self._scheduler.connection.connection_pool.disconnect()

    def _run(self) -> None:
        while True:
            try:
                if self._worker.should_run_maintenance_tasks:
                    self._worker.clean_registries()
                if self._scheduler is not None:
                    self._schedule(self._scheduler)
            except ERRORS:
                pass  # the loop reports it
            except Exception:  # noqa: BLE001 - the jobs themselves are not concerned
                logger().exception("upkeep_failed")
            if self._done.wait(EVERY_S):
                break
        if self._scheduler is not None:
            with suppress(*ERRORS):  # they expire
                self._scheduler.release_locks()
                if hasattr(self._scheduler, "register_death"):
                    self._scheduler.register_death()

    @staticmethod
    def _schedule(scheduler: RQScheduler) -> None:
        if scheduler.acquired_locks:
            scheduler.heartbeat()
        # RQ's own tries every ten minutes only: a worker that takes over from another is to have it soon.
        elif scheduler.acquire_locks() and hasattr(scheduler, "register_birth"):  # RQ 3 lists schedulers
            scheduler.register_birth()
        scheduler.enqueue_scheduled_jobs()
