"""What the sync and the asyncio client need to know about redis-py: options in, typed errors out."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from gristmill.core import BLOCK_S
from gristmill.errors import BrokerUnavailable, InvalidRequestError

SOCKET_TIMEOUT_S: Final = 10.0
CONNECTIONS: Final = 32
SCHEMES: Final = ("redis://", "rediss://", "unix://")

if SOCKET_TIMEOUT_S <= BLOCK_S:
    raise RuntimeError("a blocking read has to end before its socket times out")

# Waiting does not help against these; everything else that goes wrong with a connection may pass.
_FINAL: Final = (exceptions.AuthenticationError, exceptions.AuthorizationError)
_PASSING: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    OSError,
)
# Redis 6.2 wraps a command's error in a script's: there only the message tells.
_PASSING_CODES: Final = ("LOADING", "MISCONF", "NOREPLICAS", "OOM command", "READONLY")
ERRORS: Final = (exceptions.RedisError, OSError)  # what a call of the driver can raise


def check_url(url: str) -> str:
    """Return ``url`` if it is a Redis URL, else raise :class:`InvalidRequestError`."""
    if not isinstance(url, str) or not url.startswith(SCHEMES):
        raise InvalidRequestError(
            f"{url!r} is not a Redis URL: use redis://host:6379/0, rediss://… (TLS) or unix:///path"
        )
    try:
        urlsplit(url).port  # noqa: B018 - raises on a port that is no number
    except ValueError as error:
        raise InvalidRequestError(f"{url!r} is not a Redis URL: {error}") from error
    return url


def pool_options() -> dict[str, Any]:
    """Options of both clients' connection pools. Retries are ours: the driver's would be blind."""
    return {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "max_connections": CONNECTIONS,
        "timeout": SOCKET_TIMEOUT_S,  # for a free connection
    }


def translate(error: Exception, url: str) -> BrokerUnavailable:
    """Return our error for one of the driver's."""
    where = urlsplit(url)
    name = f"{where.hostname}:{where.port or 6379}" if where.hostname else where.path
    message = str(error) or type(error).__name__
    if isinstance(error, _FINAL):
        return BrokerUnavailable(f"Redis at {name} refused the login: {message}", retryable=False)
    if isinstance(error, _PASSING) or any(code in message for code in _PASSING_CODES):
        return BrokerUnavailable(f"Redis at {name} is not available: {message}")
    return BrokerUnavailable(f"Redis at {name} refused a command: {message}", retryable=False)
