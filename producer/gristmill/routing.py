"""Which server a command goes to, where there are several: no I/O, shared by sync and asyncio connections.

A route is a generator that yields what to send where and is sent the replies, errors of Redis among them; a
connection that fails is thrown into it. Nothing that may have been carried out is sent again: a server that
redirects a command has not carried it out, all else is the caller's decision.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from redis import exceptions

SOCKET_TIMEOUT_S: Final = 10.0
ERRORS: Final = (exceptions.RedisError, OSError)  # what a call of the driver can raise


Args = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A server to connect to; a ``primary`` is asked at each connection whether it is one."""

    url: str
    timeout_s: float = SOCKET_TIMEOUT_S
    primary: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send commands together and return their replies."""

    place: Place
    commands: Sequence[Args]


Route = Generator[Send, list[Any], list[Any]]


class Router(Protocol):
    """Knows where commands go; used by many threads at once."""

    def route(self, commands: Sequence[Args]) -> Route:
        """Have ``commands``, all for keys of one slot, carried out; returns their replies."""
        ...
