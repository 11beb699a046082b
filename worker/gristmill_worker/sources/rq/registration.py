"""This worker in RQ's registry of workers: what ``rq info`` and dashboards show."""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import Final

from redis import Redis
from rq import Queue, SimpleWorker
from rq.registry import BaseRegistry
from rq.timeouts import TimerDeathPenalty

from gristmill.driver import SOCKET_TIMEOUT_S
from gristmill_worker.sources.rq.names import Names
from gristmill_worker.sources.rq.payload import Json
from gristmill_worker.sources.streams import connect
from gristmill_worker.telemetry import logger

RECORD_TTL_S: Final = 15  # RQ adds a minute: so long a worker that was killed is still listed


class Registration:
    """RQ's worker object of this process; ``client`` is a connection pool for RQ's own code."""

    def __init__(self, url: str, queue: str, name: str, result_ttl_s: int) -> None:
        self.client = connect(url)
        self.worker = rq_worker(self.client, queue, name, result_ttl_s)
        self.names = Names.of(self.worker.queues[0], name)
        self._entered = False
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Register; a record of an earlier process of this name gives way."""
        with self._lock:
            self.client.delete(self.names.worker)
            self.worker.register_birth()
            self.worker.set_state("idle")
            self._entered = True

    def beat(self, job_id: str | None) -> None:
        """Renew the record; ``job_id`` is one of those that are being worked on."""
        with self._lock:
            if not self._entered:
                return
            if not self.client.hexists(self.names.worker, "birth"):  # Redis came back without it
                self.client.delete(self.names.worker)
                self.worker.register_birth()
            with self.client.pipeline() as pipeline:
                self.worker.heartbeat(pipeline=pipeline)
                self.worker.set_state("idle" if job_id is None else "busy", pipeline=pipeline)
                if hasattr(self.worker, "set_current_job_id"):  # RQ 3 looks at the executions
                    self.worker.set_current_job_id(job_id, pipeline=pipeline)
                pipeline.execute()

    def leave(self) -> None:
        if self._entered:
            self.worker.register_death()

    def close(self) -> None:
        self.client.close()
        self.client.connection_pool.disconnect()


def rq_worker(client: Redis, queue: str, name: str, result_ttl_s: int) -> SimpleWorker:
    """Return RQ's worker object, whose bookkeeping is used, but not its loop; no command is sent."""
    BaseRegistry.death_penalty_class = TimerDeathPenalty  # type: ignore[assignment]  # signals reach the main thread only
    rq_queue = Queue(queue, connection=client, serializer=Json, death_penalty_class=TimerDeathPenalty)
    worker = SimpleWorker([rq_queue], name=name, connection=client, serializer=Json, prepare_for_work=False)
    worker.death_penalty_class = TimerDeathPenalty
    worker.worker_ttl = RECORD_TTL_S
    worker.default_result_ttl = result_ttl_s
    worker.hostname, worker.pid = socket.gethostname(), os.getpid()
    # RQ has prepared the connection for a wait of many minutes.
    client.connection_pool.connection_kwargs["socket_timeout"] = SOCKET_TIMEOUT_S
    return worker


class _ToLog(logging.Handler):
    """Hands what RQ logs to this project's log."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        logger().warning("rq", message=record.getMessage(), exc_info=error)


def redirect_log() -> None:
    """Have RQ's warnings and errors written as one line of JSON each."""
    log = logging.getLogger("rq")
    log.handlers = [_ToLog(logging.WARNING)]
    log.propagate = False
