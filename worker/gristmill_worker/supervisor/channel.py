"""What a supervisor and a worker tell each other: JSON objects, one a line, over a socket pair."""

from __future__ import annotations

import socket
import threading
from typing import Any, Final

import orjson

MOST_BYTES: Final = 1 << 20  # waiting in either direction; a peer that does not read is not waited for


class Channel:
    """One end. ``send`` may be called by any thread, ``receive`` by one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        self._rest = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send ``message``. Raises OSError where the other end is gone, or does not read."""
        with self._lock:
            self._socket.sendall(orjson.dumps(message) + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return what came, after waiting for something to come; None at the end. Raises BlockingIOError."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            return None
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if not data or len(self._rest) > MOST_BYTES:
            return None
        return [orjson.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()
