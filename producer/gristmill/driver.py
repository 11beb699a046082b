"""What the sync and the asyncio client need to know about redis-py: options in, typed errors out."""

from __future__ import annotations

from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from gristmill.core import BLOCK_S
from gristmill.errors import BrokerUnavailable, InvalidRequestError

P = TypeVar("P", bound=Any)

SOCKET_TIMEOUT_S: Final = 10.0
CONNECTIONS: Final = 32
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


def translate(error: Exception, url: str) -> BrokerUnavailable:
    """Return our error for one of the driver's."""
    where = urlsplit(url)
    name = f"{where.hostname}:{where.port or 6379}" if where.hostname else where.path
    message = str(error) or type(error).__name__
    if isinstance(error, _DENIED) or "NOPERM" in message:
        denied = f"Redis at {name} refused the login or lacks a permission: {message}"
        return BrokerUnavailable(denied, retryable=False, denied=True)
    if isinstance(error, _PASSING) or any(code in message for code in _PASSING_CODES):
        return BrokerUnavailable(f"Redis at {name} is not available: {message}")
    return BrokerUnavailable(f"Redis at {name} refused a command: {message}", retryable=False)
