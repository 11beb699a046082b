"""What we need to know about redis-py: options in, typed errors out, and commands without its detours."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

from redis import ConnectionPool, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from gristmill import scripts
from gristmill.core import BLOCK_S
from gristmill.errors import BrokerUnavailable, InvalidRequestError

P = TypeVar("P", bound=Any)

SOCKET_TIMEOUT_S: Final = 10.0
CONNECTIONS: Final = 32
RESTED_S: Final = 1.0  # after so long a connection may have been closed at the other end
URL_OPTIONS: Final = (
    "db",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
)
SCHEMES: Final = ("redis://", "rediss://", "unix://")

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
    "BUSY Redis",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "OOM command",
    "READONLY",
    "UNBLOCKED",
)
ERRORS: Final = (exceptions.RedisError, OSError)  # what a call of the driver can raise


def open_pool(kind: type[P], url: str) -> P:
    """Return a connection pool of ``kind`` for ``url``; nothing is connected yet.

    Retries are ours: the driver's would be blind. Raises InvalidRequestError for a URL that is none, or has
    options that would change how we talk to Redis.
    """
    if not isinstance(url, str) or not url.startswith(SCHEMES):
        raise InvalidRequestError(
            f"{url!r} is not a Redis URL: use redis://host:6379/0, rediss://… (TLS) or unix:///path"
        )
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
    }
    if "Blocking" in kind.__name__:
        options |= {"max_connections": CONNECTIONS, "timeout": SOCKET_TIMEOUT_S}  # for a free connection
    try:
        if unknown := parse_qs(urlsplit(url).query).keys() - URL_OPTIONS:
            listed = ", ".join(sorted(unknown))
            raise InvalidRequestError(
                f"the Redis URL has options that cannot be set ({listed}): use {', '.join(URL_OPTIONS)}"
            )
        urlsplit(url).port  # noqa: B018 - raises on a port that is no number
        pool: P = kind.from_url(url, **options)
        pool.connection_class(**pool.connection_kwargs)  # not connected; raises on values of a wrong type
    except (ValueError, TypeError, AttributeError, exceptions.RedisError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{url!r} is not a Redis URL: {error}") from error
    return pool


class Connections:
    """Sends commands and returns the replies as they are; thread-safe, each caller gets a connection.

    The driver's own client does more around each command (pool, health checks, metrics, retries, types of
    replies) than the command itself needs: half of a round trip's time. A connection that fails is opened
    again by its next command; to repeat a command is the caller's decision.
    """

    def __init__(self, url: str) -> None:
        self._pool = open_pool(ConnectionPool, url)
        self._idle: list[tuple[Any, float]] = []  # and since when; the last one used is the next
        self._free = threading.BoundedSemaphore(CONNECTIONS)

    def call(self, *command: Any) -> Any:
        """Carry out one command. Raises one of ERRORS."""
        return self.calls(command)[0]

    def calls(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands together and return their replies, or raise the first error among these."""
        if not self._free.acquire(timeout=SOCKET_TIMEOUT_S):
            raise exceptions.ConnectionError(f"all {CONNECTIONS} connections are in use")
        try:
            connection = self._take()
            try:
                connection.send_packed_command(connection.pack_commands(commands))
                replies = [_reply(connection) for _ in commands]
            except BaseException:  # Ctrl-C too: the reply would be taken for that of the next command
                connection.disconnect()
                raise
            finally:
                self._idle.append((connection, time.monotonic()))
        finally:
            self._free.release()
        for reply in replies:
            if isinstance(reply, exceptions.ResponseError):
                raise reply
        return replies

    def run(self, script: str, names: Sequence[str], args: Sequence[Any]) -> Any:
        """Run one of :mod:`gristmill.scripts`."""
        try:
            return self.call("EVALSHA", scripts.digest(script), len(names), *names, *args)
        except exceptions.NoScriptError:
            return self.call("EVAL", scripts.source(script), len(names), *names, *args)

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

    def close(self) -> None:
        """Close all connections; a command opens them again."""
        self._pool.disconnect()


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except exceptions.ResponseError as error:
        return error


def translate(error: Exception, url: str) -> BrokerUnavailable:
    """Return our error for one of the driver's."""
    where = urlsplit(url)
    name = f"{where.hostname}:{where.port or 6379}" if where.hostname else where.path
    message = str(error) or type(error).__name__
    if isinstance(error, _DENIED) or "NOPERM" in message:
        denied = f"Redis at {name} refused the login or lacks a permission: {message}"
        return BrokerUnavailable(denied, retryable=False, denied=True)
    unwilling = isinstance(error, _UNWILLING) or any(code in message for code in _UNWILLING_CODES)
    if unwilling or isinstance(error, _AWAY):
        return BrokerUnavailable(f"Redis at {name} is not available: {message}", unwilling=unwilling)
    return BrokerUnavailable(f"Redis at {name} refused a command: {message}", retryable=False)
