"""A worker process under a supervisor: ``python -m gristmill_worker.supervisor.entry FD``."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from typing import Final, NoReturn

from gristmill.errors import ExitCode, GristmillError
from gristmill_worker.memory import memory_mb
from gristmill_worker.service import Provide, keep_to, serve
from gristmill_worker.settings import Settings
from gristmill_worker.supervisor.channel import Channel
from gristmill_worker.telemetry import logger

REPORT_S: Final = 1.0
MEMORY_EVERY: Final = 10  # reports
ALONE_S: Final = 60  # to finish what was taken after the supervisor died


class Reporter:
    """The worker's end: says when it is ready, waits until it may serve, then reports each second."""

    def __init__(self, channel: Channel, settings: Settings) -> None:
        self._channel = channel
        self._settings = settings
        self._provide: Provide | None = None  # there when it is ready
        self._go = threading.Event()
        self._cores: tuple[int, ...] = ()
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()

    def ready(self, provide: Provide) -> None:
        """Tell the supervisor that the engine is warm, and wait for its word."""
        self._provide = provide
        with suppress(OSError):  # the other thread sees it too
            self._channel.send(ready=provide(), memory=memory_mb())
        threading.Thread(target=self._report, args=(provide,), name="report", daemon=True).start()
        self._go.wait()
        if self._cores != self._settings.cores:  # it was a spare
            keep_to(self._settings.model_copy(update={"cores": self._cores}))

    def _listen(self) -> None:
        while (messages := self._channel.receive()) is not None:
            for message in messages:
                if "go" in message:
                    self._cores = tuple(message["go"])
                    self._go.set()
        # The supervisor is gone: nobody would start this worker again, nor stop it.
        if self._provide is None or not self._go.is_set():
            os._exit(ExitCode.FORCED)  # nothing was taken yet
        self._finish(self._provide)

    def _finish(self, provide: Provide) -> NoReturn:
        """Let this worker finish what it has. It may be at that already: a second signal would end it."""
        told = False
        for _ in range(ALONE_S):
            time.sleep(1)
            if provide()["ready"] and not told:
                os.kill(os.getpid(), signal.SIGTERM)
                told = True
        os._exit(ExitCode.FORCED)

    def _report(self, provide: Provide) -> None:
        pause = threading.Event()
        for number in count(1):
            pause.wait(REPORT_S)
            # The kernel walks through all pages for it.
            memory = {"memory": memory_mb()} if number % MEMORY_EVERY == 0 else {}
            try:
                self._channel.send(snapshot=provide(), **memory)
            except OSError:
                return  # the other thread sees it too
            except Exception:  # noqa: BLE001 - who falls silent is ended
                logger().exception("report_failed")


def main() -> int:
    """Serve with the settings that come first; an error is told before the process ends."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal's: it is for the supervisor
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    first = channel.receive()
    if not first:
        return ExitCode.FAILURE
    settings = Settings.model_validate(first[0]["settings"])
    if settings.name:
        settings = settings.model_copy(update={"name": f"{settings.name}-{os.getpid()}"})
    try:
        return serve(settings, ready=Reporter(channel, settings).ready, soon=first[0]["soon"])
    except GristmillError as error:
        with suppress(OSError):
            channel.send(failed=str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
