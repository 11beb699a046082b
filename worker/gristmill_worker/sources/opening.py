"""From settings to the queue that they name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gristmill.console import needs_extra
from gristmill.errors import InputFileError
from gristmill_worker.settings import Settings
from gristmill_worker.sources.base import ServedSource
from gristmill_worker.sources.streams import StreamSource

Open = Callable[[str], ServedSource]


def prepare(settings: Settings) -> Open:
    """Return what opens the queue under a worker's name; nothing is connected yet.

    Raises InputFileError where queues of this kind cannot be served here.
    """
    return _rq_opener(settings) if settings.source == "rq" else _streams_opener(settings)


def _streams_opener(settings: Settings) -> Open:
    return lambda name: StreamSource(
        settings.redis, settings.queue, name, lease_s=settings.lease_s, result_ttl_s=settings.result_ttl_s
    )


def _rq_opener(settings: Settings) -> Open:
    with needs_extra("rq"):
        from gristmill_worker.sources.rq.source import RqSource  # noqa: PLC0415 - an extra
    if not settings.rq.path.is_dir():
        raise InputFileError(f"rq.path: {settings.rq.path} is no folder: callbacks are imported from there")
    sys.path.append(str(settings.rq.path))
    return lambda name: RqSource(
        settings.redis,
        settings.queue,
        name,
        lease_s=settings.lease_s,
        result_ttl_s=settings.result_ttl_s,
        max_deliveries=settings.max_deliveries,
        allow_pickle=settings.rq.allow_pickle,
        scheduler=settings.rq.with_scheduler,
    )
