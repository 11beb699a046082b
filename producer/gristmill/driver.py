"""What we need to know about redis-py: options in, typed errors out, and commands without its detours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from redis import ConnectionPool, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from gristmill import scripts, urls
from gristmill.cluster import ClusterRouter
from gristmill.core import BLOCK_S
from gristmill.errors import BrokerUnavailable, InvalidRequestError
from gristmill.routing import ERRORS, SOCKET_TIMEOUT_S, Args, Place, Router
from gristmill.sentinel import DEMOTED, SentinelRouter

__all__ = ["ERRORS", "SOCKET_TIMEOUT_S", "Connections", "open_pool", "translate"]

P = TypeVar("P", bound=Any)

CONNECTIONS: Final = 32  # to one server
RESTED_S: Final = 1.0  # after so long a connection may have been closed at the other end

if SOCKET_TIMEOUT_S <= BLOCK_S:
    raise RuntimeError("a blocking read has to end before its socket times out")

# Waiting does not help against these; everything else that goes wrong with a connection may pass.
_DENIED: Final = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.NoPermissionError,
)
_AWAY: Final = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_UNWILLING: Final = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
)
# Redis 6.2 wraps a command's error in a script's: there only the message tells.
# UNBLOCKED: a blocking read, where a replica becomes a primary or the reverse. BUSY: a script runs for long.
_UNWILLING_CODES: Final = (
    *DEMOTED,
    "BUSY Redis",
    "LOADING",
    "MISCONF",
    "NOREPLICAS",
    "OOM command",
)


def open_pool(kind: type[P], url: str, *, timeout_s: float = SOCKET_TIMEOUT_S, **more: Any) -> P:
    """Return a connection pool of ``kind`` for the ``url`` of one server; nothing is connected yet.

    Retries are ours: the driver's would be blind. Raises InvalidRequestError for a URL that is none, or has
    options that would change how we talk to Redis.
    """
    if urls.parse(url) is not None:
        raise InvalidRequestError(f"{urls.hidden(url)!r} is not the URL of one Redis server")
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        **more,
    }
    try:
        urls.check_options(urlsplit(url).query, urls.URL_OPTIONS)
        urlsplit(url).port  # noqa: B018 - raises on a port that is no number
        pool: P = kind.from_url(url, **options)
        pool.connection_class(**pool.connection_kwargs)  # not connected; raises on values of a wrong type
    except (ValueError, TypeError, AttributeError, exceptions.RedisError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{urls.hidden(url)!r} is not a Redis URL: {error}") from error
    return pool


def router(url: str) -> Router | None:
    """Return what finds the server where a URL names several, None for one server.

    Raises InvalidRequestError for a URL that is none.
    """
    servers = urls.parse(url)
    if servers is None:
        return None
    open_pool(ConnectionPool, servers.node_url(servers.nodes[0]))  # nothing connects: it checks the options
    return SentinelRouter(servers) if servers.service else ClusterRouter(servers)


class Connections:
    """Sends commands and returns the replies as they are; thread-safe, each caller gets a connection.

    The driver's own client does more around each command (pool, health checks, metrics, retries, types of
    replies) than the command itself needs: half of a round trip's time. A connection that fails is opened
    again by its next command; to repeat a command is the caller's decision.

    Commands of one call go to one server, so their keys have to be of one queue.
    """

    calls: Callable[..., list[Any]]
    """Send commands together and return their replies, or raise the first error among these."""

    def __init__(self, url: str) -> None:
        route = router(url)
        self._server = _Server(Place(url)) if route is None else _Routed(route)
        self.calls = self._server.calls

    def call(self, *command: Any) -> Any:
        """Carry out one command. Raises one of ERRORS."""
        return self.calls(command)[0]

    def run(self, script: str, names: Sequence[str], args: Sequence[Any]) -> Any:
        """Run one of :mod:`gristmill.scripts`."""
        try:
            return self.call("EVALSHA", scripts.digest(script), len(names), *names, *args)
        except exceptions.NoScriptError:
            return self.call("EVAL", scripts.source(script), len(names), *names, *args)

    def reachable(self) -> bool:
        """Say whether the server answers at all."""
        try:
            return bool(self.call("PING"))
        except ERRORS:
            return False

    def close(self) -> None:
        """Close all connections; a command opens them again."""
        self._server.close()


class _Server:
    """Connections to one server."""

    def __init__(self, place: Place) -> None:
        self._pool = open_pool(ConnectionPool, place.url, timeout_s=place.timeout_s, **_greeting(place))
        self._idle: list[tuple[Any, float]] = []  # and since when; the last one used is the next
        self._free = threading.BoundedSemaphore(CONNECTIONS)

    def calls(self, *commands: Args) -> list[Any]:
        return raise_first(self.send(commands))

    def send(self, commands: Sequence[Args]) -> list[Any]:
        """Send commands together and return their replies, errors among them."""
        if not self._free.acquire(timeout=SOCKET_TIMEOUT_S):
            raise exceptions.ConnectionError(f"all {CONNECTIONS} connections are in use")
        try:
            connection = self._take()
            try:
                connection.send_packed_command(connection.pack_commands(commands))
                return [_reply(connection) for _ in commands]
            except BaseException:  # Ctrl-C too: the reply would be taken for that of the next command
                connection.disconnect()
                raise
            finally:
                self._idle.append((connection, time.monotonic()))
        finally:
            self._free.release()

    def _take(self) -> Any:
        try:
            connection, since = self._idle.pop()
        except IndexError:
            return self._pool.get_connection()
        if time.monotonic() - since > RESTED_S:
            try:
                closed = connection.can_read()  # there is nothing to read, unless it is the end
            except ERRORS:
                closed = True
            if closed:
                connection.disconnect()
        return connection

    def hang_up(self) -> None:
        """Close the connections that nobody uses: the server failed."""
        closed = []
        with suppress(IndexError):  # one by one: other threads take and give back meanwhile
            while True:
                connection, since = self._idle.pop()
                connection.disconnect()
                closed.append((connection, since))
        self._idle += closed

    def close(self) -> None:
        self._pool.disconnect()


class _Routed:
    """Connections to all servers that a router names."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._servers: dict[Place, _Server] = {}

    def calls(self, *commands: Args) -> list[Any]:
        route = self._router.route(commands)
        try:
            send = next(route)
            while True:
                server = self._servers.get(send.place) or self._servers.setdefault(
                    send.place, _Server(send.place)
                )
                try:
                    replies = server.send(send.commands)
                except ERRORS as error:
                    server.hang_up()
                    send = route.throw(error)
                else:
                    send = route.send(replies)
        except StopIteration as stop:
            return raise_first(stop.value)

    def close(self) -> None:
        for server in list(self._servers.values()):
            server.close()


def raise_first(replies: list[Any]) -> list[Any]:
    """Return ``replies``, or raise the first error among them."""
    for reply in replies:
        if isinstance(reply, exceptions.ResponseError):
            raise reply
    return replies


def check_role(reply: Any) -> None:
    """Raise ConnectionError if this is not a primary's reply to ROLE."""
    if reply[0] != b"master":
        raise exceptions.ConnectionError("the server that was the primary is a replica now")


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except exceptions.ResponseError as error:
        return error


def _greeting(place: Place) -> dict[str, Any]:
    def greet(connection: Any) -> None:
        connection.on_connect()
        connection.send_command("ROLE")
        check_role(connection.read_response())

    return {"redis_connect_func": greet} if place.primary else {}


def translate(error: Exception, url: str) -> BrokerUnavailable:
    """Return our error for one of the driver's."""
    name = urls.name(url)
    message = str(error) or type(error).__name__
    if isinstance(error, _DENIED) or "NOPERM" in message:
        denied = f"{name} refused the login or lacks a permission: {message}"
        return BrokerUnavailable(denied, retryable=False, denied=True)
    unwilling = isinstance(error, _UNWILLING) or any(code in message for code in _UNWILLING_CODES)
    if unwilling or isinstance(error, _AWAY):
        return BrokerUnavailable(f"{name} is not available: {message}", unwilling=unwilling)
    if isinstance(error, exceptions.MovedError):
        message = f"it is a node of a Redis Cluster, use redis+cluster://… ({message})"
    return BrokerUnavailable(f"{name} refused a command: {message}", retryable=False)
