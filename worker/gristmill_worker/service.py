"""One worker process from start to end: bind, load, serve, drain."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Final

from gristmill.core import process_name
from gristmill.errors import BrokerUnavailable, ExitCode, InputFileError
from gristmill_worker.batching.sizing import Sizing
from gristmill_worker.engines.base import Engine
from gristmill_worker.jobs import Judge
from gristmill_worker.loading import load_model
from gristmill_worker.loop import Loop
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.pulse import Pulse
from gristmill_worker.settings import Settings
from gristmill_worker.sharing import Sharing
from gristmill_worker.sources.streams import StreamSource
from gristmill_worker.tasks.base import make_task
from gristmill_worker.telemetry import configure_logging, logger
from gristmill_worker.watchdog import TimedEngine

WAKE_S: Final = 0.2
SWITCH_S: Final = 0.0005  # Python's 5 ms would let one stage hold up the others
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def serve(settings: Settings) -> ExitCode:
    """Serve the queue until a signal: the first drains, a second ends the process at once.

    Raises InputFileError for a model or setting that cannot be used, BrokerUnavailable for a refused login.
    """
    configure_logging(settings.log_level)
    sys.setswitchinterval(SWITCH_S)
    stop = _Stop()
    _bind(settings)
    name = settings.name or process_name()
    logger().info("loading", worker=name, model=str(settings.model), engine=settings.engine)
    started = time.perf_counter()
    loaded = load_model(settings)
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
        costs="measured" if sizing.measured else "by formula: 'gristmill-worker tune' measures this CPU",
        seconds=round(time.perf_counter() - started, 2),
    )
    source = StreamSource(
        settings.redis, settings.queue, name, lease_s=settings.lease_s, result_ttl_s=settings.result_ttl_s
    )
    judge = Judge(
        name,
        manifest.id,
        max_deliveries=settings.max_deliveries,
        max_body_bytes=settings.max_body_bytes,
        retry=settings.retry,
    )
    sharing = Sharing(round(settings.result_cache_mb * 2**20))
    loop = Loop(source, engine, task, settings.batch, sizing, judge, sharing, stop.event)
    about = _about(name, settings, manifest, engine)
    pulse = Pulse(
        source,
        settings.redis,
        settings.lease_s,
        lambda: about | {key: str(value) for key, value in loop.counters.snapshot().items()},
    )
    _serve(loop, pulse, sizing, stop)
    source.leave()
    engine.close()
    logger().info("stopped", worker=name, **loop.counters.snapshot())
    return ExitCode.OK


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


def _bind(settings: Settings) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if settings.cores is not None:
        try:
            # Threads of engine and tokenizer inherit it; numpy's are there already.
            for thread in Path("/proc/self/task").iterdir():
                os.sched_setaffinity(int(thread.name), settings.cores)
        except (OSError, ValueError) as error:
            allowed = sorted(os.sched_getaffinity(0))
            raise InputFileError(
                f"cores: {list(settings.cores)} cannot be used ({error}); this process may use {allowed}"
            ) from error


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
        os.write(sys.stderr.fileno(), b'{"event": "draining", "signal": %d}\n' % number)


def _serve(loop: Loop, pulse: Pulse, sizing: Sizing, stop: _Stop) -> None:
    """Run the loop beside this thread, which thus stays free for signals whatever the engine does."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the main thread
            failure.append(error)

    stop.serving = True
    thread = threading.Thread(target=run, name="take", daemon=True)
    thread.start()
    pulse.start()
    while thread.is_alive():
        # The kernel may hand a signal to any thread; the main one runs the handlers, but has to wake up.
        thread.join(WAKE_S)
        sizing.advise()
    pulse.stop()
    if failure:
        if isinstance(failure[0], BrokerUnavailable):
            raise failure[0]
        raise RuntimeError("the worker's loop ended") from failure[0]
