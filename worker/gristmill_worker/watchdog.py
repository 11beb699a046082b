"""Ends the process where a batch runs too long, whatever the engine holds: the kernel's timer does it."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Mapping

from gristmill_worker.engines.base import Array, Engine


class TimedEngine:
    """An engine whose batches may take ``timeout_s`` seconds each; for one thread at a time.

    After that the kernel sends SIGALRM. It is handled without Python, so an engine that holds the interpreter
    lock for ever is no obstacle: where each thread was goes to stderr, then the signal ends the process. The
    process has one such timer. To be made in the main thread.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self.name = engine.name
        self.precision = engine.precision
        self.shapes = engine.shapes
        self._engine = engine
        self._timeout_s = timeout_s
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a parent may have left it ignored, or blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        faulthandler.unregister(signal.SIGALRM)  # of an earlier engine: else it counts as there
        faulthandler.register(signal.SIGALRM, file=sys.stderr, all_threads=True, chain=True)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See :meth:`~gristmill_worker.engines.base.Engine.run`."""
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
        try:
            return self._engine.run(inputs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def close(self) -> None:
        self._engine.close()
