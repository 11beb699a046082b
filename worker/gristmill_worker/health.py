"""A small HTTP server for /metrics, /healthz and /readyz, which no slow client holds up."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

import orjson

from gristmill.errors import InputFileError
from gristmill_worker import metrics
from gristmill_worker.depths import Depths, Reader
from gristmill_worker.settings import parse_address
from gristmill_worker.telemetry import logger
from gristmill_worker.vitals import Snapshot, trouble, unready

MOST: Final = 8  # connections at a time: where one more comes the oldest is closed
TIMEOUT_S: Final = 5.0  # of one read or write of a connection

Provide = Callable[[], Sequence[Snapshot]]


def serve(address: str, provide: Provide, reader: Reader) -> Server:
    """Serve /metrics, /healthz and /readyz of the workers that ``provide`` returns, in threads of its own.

    ``reader`` knows their queues, and is closed with the server. Raises InputFileError where the address
    cannot be listened at.
    """
    try:
        host, port = parse_address(address)
        server = Server((host, port), provide, Depths(reader))
    except (OSError, ValueError) as error:
        raise InputFileError(f"metrics: {address!r} cannot be listened at: {error}") from error
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    logger().info("metrics_served", address=server.address)
    return server


class Server(ThreadingHTTPServer):
    """Answers each request in a thread of its own, MOST of them at the most."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], provide: Provide, depths: Depths) -> None:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self.provide = provide
        self.depths = depths
        self._open: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    @property
    def address(self) -> str:
        """Where it listens: HOST:PORT."""
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self.depths.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread; who is slow, by bad will or not, makes room for who came last."""
        with self._lock:
            self._open.append(request)
            oldest = self._open.popleft() if len(self._open) > MOST else None
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread's read or write fails
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget and close a connection that was answered."""
        with self._lock, suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave it: a client that goes away is no event of the worker's."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = TIMEOUT_S
    server_version = "gristmill"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        snapshots = self.server.provide()
        if path == "/metrics":
            depths = self.server.depths.get({each["queue"] for each in snapshots})
            self._answer(HTTPStatus.OK, metrics.CONTENT_TYPE, metrics.render(snapshots, depths))
        elif path == "/healthz":
            self._judge(snapshots, trouble, "")
        elif path == "/readyz":
            self._judge(snapshots, unready, "no worker runs")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"use /metrics, /healthz or /readyz\n")

    do_HEAD = do_GET  # noqa: N815 - the base class's names

    def _judge(
        self, snapshots: Sequence[Snapshot], reason: Callable[[Snapshot, float], str], none: str
    ) -> None:
        now = time.monotonic()
        reasons = {each["name"]: why for each in snapshots if (why := reason(each, now))}
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons or (none and not snapshots) else HTTPStatus.OK
        found = {"ok": status == HTTPStatus.OK, "workers": len(snapshots), "reasons": reasons}
        if none and not snapshots:
            found["reasons"] = {"": none}
        self._answer(status, "application/json", orjson.dumps(found) + b"\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Stay quiet: probes come every few seconds."""
