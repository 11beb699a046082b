"""The primary that sentinels name; no I/O (see :mod:`gristmill.routing`)."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, Final

from redis import exceptions

from gristmill.routing import ERRORS, Args, Place, Route, Send
from gristmill.urls import Node, Servers

TIMEOUT_S: Final = 2.0  # a sentinel answers at once or is not there, and there are others
GLANCE_S: Final = 1.0  # how often a sentinel is asked although all goes well
SHUNNED_S: Final = 30.0  # how long one that failed is not asked, unless all have
# Codes at the start of a reply, or (from a script in Redis 6.2) anywhere in it.
DEMOTED: Final = ("READONLY", "UNBLOCKED", "MASTERDOWN")


class SentinelRouter:
    """Sends everything to the primary that the sentinels name.

    They are asked again once it fails or refuses, and every GLANCE_S: after a planned failover the old
    primary takes requests for ten seconds more, until it is told what it is now, and throws them away.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._sentinels = [Place(servers.sentinel_url(node), TIMEOUT_S) for node in servers.nodes]
        self._failed: dict[Place, float] = {}  # sentinel -> when
        self._primary: Place | None = None
        self._last: Place | None = None  # that was one
        self._epoch = 0  # of the configuration that names it
        self._glance_at = 0.0

    def route(self, commands: Sequence[Args]) -> Route:
        """See :class:`Router`."""
        primary = self._primary
        if primary is None:
            primary = yield from self._find()
        elif time.monotonic() >= self._glance_at:
            self._glance_at = time.monotonic() + GLANCE_S
            yield from self._glance(primary)
        try:
            replies = yield Send(primary, commands)
        except ERRORS:
            self._doubt(primary)
            raise
        if any(isinstance(reply, exceptions.ResponseError) and _demoted(reply) for reply in replies):
            self._doubt(primary)
        return replies

    def _find(self) -> Generator[Send, list[Any], Place]:
        """Ask one sentinel after the other until one names a primary that is not yesterday's."""
        failure: Exception | None = None
        known: list[tuple[int, Place]] = []
        for sentinel in self._in_order():
            try:
                answer = yield from self._ask(sentinel)
            except ERRORS as error:
                failure = error
                continue
            if answer is not None:
                known.append(answer)
                if answer[0] >= self._epoch:
                    break
        if known:
            # If all are older than what was known, the sentinels were set up anew.
            self._epoch, primary = max(known, key=lambda answer: answer[0])
            self._primary = self._last = primary
            self._glance_at = time.monotonic() + GLANCE_S
            return primary
        if failure is None:
            raise exceptions.ResponseError(f"the sentinels know no service {self._servers.service!r}")
        if self._last is None:
            raise failure
        return self._last  # it says itself whether it still is one

    def _glance(self, primary: Place) -> Generator[Send, list[Any], None]:
        """Ask one sentinel, and raise ConnectionError if it knows of a later primary."""
        sentinel = self._in_order()[0]
        if self._has_failed(sentinel):
            return
        try:
            answer = yield from self._ask(sentinel)
        except ERRORS:
            return  # the primary works
        if answer is not None and answer[0] > self._epoch:
            self._epoch, latest = answer
            self._primary = self._last = latest
            if latest != primary:  # not in silence: what was acknowledged may have to be done again
                raise exceptions.ConnectionError("the sentinels have named another primary")

    def _ask(self, sentinel: Place) -> Generator[Send, list[Any], tuple[int, Place] | None]:
        """Return the epoch of a sentinel's configuration and its primary; None if it knows no service."""
        service = self._servers.service
        self._sentinels = [*(each for each in self._sentinels if each != sentinel), sentinel]
        try:
            # The first names a new primary earlier, but has no epoch.
            address, details = yield Send(
                sentinel,
                [("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service), ("SENTINEL", "MASTER", service)],
            )
            for reply in (address, details):
                if isinstance(reply, exceptions.ResponseError) and "No such master" not in str(reply):
                    raise reply
        except ERRORS:
            self._failed[sentinel] = time.monotonic()
            raise
        self._failed.pop(sentinel, None)
        if address is None or isinstance(details, exceptions.ResponseError):
            return None
        epoch = dict(zip(details[::2], details[1::2], strict=True))[b"config-epoch"]
        node = Node(address[0].decode(), int(address[1]))
        return int(epoch), Place(self._servers.node_url(node), primary=True)

    def _in_order(self) -> list[Place]:
        """Return the sentinels: the longest not asked first, those that failed lately last."""
        return sorted(self._sentinels, key=self._has_failed)

    def _has_failed(self, sentinel: Place) -> bool:
        return time.monotonic() - self._failed.get(sentinel, -SHUNNED_S) < SHUNNED_S

    def _doubt(self, primary: Place) -> None:
        if self._primary == primary:
            self._primary = None


def _demoted(error: exceptions.ResponseError) -> bool:
    return any(code in str(error) for code in DEMOTED)
