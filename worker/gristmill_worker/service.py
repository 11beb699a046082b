"""One worker process from start to end: bind, load, serve, drain."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Final

from gristmill import console
from gristmill.core import process_name
from gristmill.errors import BrokerUnavailable, ExitCode
from gristmill_worker.batching.sizing import Sizing
from gristmill_worker.depths import Readers
from gristmill_worker.engines.base import Engine
from gristmill_worker.jobs import Judge
from gristmill_worker.loading import load_model
from gristmill_worker.loop import Loop
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.pulse import Pulse
from gristmill_worker.settings import Settings
from gristmill_worker.sharing import Sharing
from gristmill_worker.sources.opening import prepare
from gristmill_worker.tasks.base import make_task
from gristmill_worker.telemetry import configure_logging, logger, say
from gristmill_worker.topology.bind import bind
from gristmill_worker.topology.facts import read_facts
from gristmill_worker.topology.plan import core_set_of
from gristmill_worker.tracing import watchers
from gristmill_worker.vitals import Snapshot, Vitals
from gristmill_worker.watchdog import TimedEngine

Provide = Callable[[], Snapshot]

WAKE_S: Final = 0.2
SWITCH_S: Final = 0.0005  # Python's 5 ms would let one stage hold up the others
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def serve(
    settings: Settings, ready: Callable[[Provide], None] = lambda _: None, *, soon: bool | None = None
) -> ExitCode:
    """Serve the queue until a signal: the first drains, a second ends the process at once.

    ``ready`` is called when the engine is warm, with a function that tells what the worker did so far;
    nothing is taken before it returns. ``soon``: see :func:`load_model`. Raises InputFileError for a model or
    setting that cannot be used, BrokerUnavailable for a refused login.
    """
    configure_logging(settings.log_level)
    sys.setswitchinterval(SWITCH_S)
    stop = _Stop()
    open_source = prepare(settings)
    keep_to(settings)
    name = settings.name or process_name()
    batch, timeout_s = settings.batch, settings.batch_timeout_s
    vitals = Vitals(name, settings.queue, max_wait_s=batch.max_wait_ms / 1000, batch_timeout_s=timeout_s)
    shown = _show(settings, vitals)
    logger().info("loading", worker=name, model=str(settings.model), engine=settings.engine)
    started = time.perf_counter()
    loaded = load_model(settings, soon=soon)
    manifest, sizing, engine = loaded.manifest, loaded.sizing, loaded.engine
    task = make_task(settings.model, manifest, truncate=settings.truncate)
    if settings.batch_timeout_s:
        engine = TimedEngine(engine, settings.batch_timeout_s)
    logger().info(
        "engine_ready",
        worker=name,
        queue=settings.queue,
        model=manifest.id,
        engine=engine.name,
        precision=engine.precision,
        threads=settings.threads,
        shapes=len(engine.shapes),
        whole=loaded.whole,
        costs="measured" if sizing.measured else "by formula: 'gristmill-worker tune' measures this CPU",
        seconds=round(time.perf_counter() - started, 2),
    )
    source = open_source(name)
    judge = Judge(
        name,
        manifest.id,
        max_deliveries=settings.max_deliveries,
        max_body_bytes=settings.max_body_bytes,
        retry=settings.attempts,
    )
    sharing = Sharing(round(settings.result_cache_mb * 2**20))
    loop = Loop(source, engine, task, batch, sizing, judge, vitals, sharing, stop.event)
    loop.on_ran = watchers(os.environ, name, settings.queue, manifest.id, shown)
    vitals.about = _about(name, settings, manifest, engine) | ({} if loaded.whole else {"provisional": "yes"})
    pulse = Pulse(source, settings.redis, settings.lease_s, vitals.heartbeat)
    ready(vitals.snapshot)
    _serve(loop, pulse, sizing, vitals, stop)
    source.leave()
    engine.close()
    shown.close()
    logger().info("stopped", worker=name, **loop.counters.snapshot())
    return ExitCode.OK


def _show(settings: Settings, vitals: Vitals) -> ExitStack:
    """Serve /metrics and the probes where that is wanted; to be closed at the end."""
    shown = ExitStack()
    if settings.metrics is not None:
        with console.needs_extra("worker"):
            from gristmill_worker import health  # noqa: PLC0415 - the library, for who wants it

        readers = Readers([settings])
        shown.enter_context(health.serve(settings.metrics, lambda: [vitals.snapshot()], readers))
    return shown


def _about(name: str, settings: Settings, manifest: Manifest, engine: Engine) -> dict[str, str]:
    return {
        "name": name,
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "started_ms": str(int(time.time() * 1000)),
        "cores": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))),
        "threads": str(settings.threads),
        "engine": engine.name,
        "precision": engine.precision,
        "model": manifest.id,
        "task": manifest.task,
    }


def keep_to(settings: Settings) -> None:
    """Keep this process to the cores that the settings name, and to memory near them."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if settings.cores is not None:
        bind(core_set_of(read_facts(), settings.cores, settings.threads), settings.memory_policy)


class _Stop:
    """What signals do: while loading they end the process, then the first drains and the second ends it."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.serving = False
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self.serving:
            os._exit(ExitCode.OK)  # nothing was taken yet
        if self.event.is_set():
            os._exit(ExitCode.FORCED)  # what is pending stays so, and is taken over after the lease
        self.event.set()
        # A logger is not reentrant.
        say(f'{{"event": "draining", "signal": {number}}}\n')


def _serve(loop: Loop, pulse: Pulse, sizing: Sizing, vitals: Vitals, stop: _Stop) -> None:
    """Run the loop beside this thread, which thus stays free for signals whatever the engine does."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the main thread
            failure.append(error)

    stop.serving = True
    thread = threading.Thread(target=run, name="take", daemon=True)
    vitals.ready = True
    thread.start()
    pulse.start()
    while thread.is_alive():
        # The kernel may hand a signal to any thread; the main one runs the handlers, but has to wake up.
        thread.join(WAKE_S)
        vitals.ready = not stop.event.is_set()
        sizing.advise()
    pulse.stop()
    if failure:
        if isinstance(failure[0], BrokerUnavailable):
            raise failure[0]
        raise RuntimeError("the worker's loop ended") from failure[0]
