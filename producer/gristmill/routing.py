"""Which server a command goes to, where there are several: no I/O, shared by sync and asyncio connections.

A route is a generator that yields what to send where and is sent the replies, errors of Redis among them; a
connection that fails is thrown into it. Nothing that may have been carried out is sent again: a server that
redirects a command has not carried it out, all else is the caller's decision.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from redis import exceptions
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from gristmill.urls import Node, Servers

SOCKET_TIMEOUT_S: Final = 10.0
SENTINEL_TIMEOUT_S: Final = 2.0  # it answers at once or is not there, and there are others
MOST_REDIRECTS: Final = 5
ERRORS: Final = (exceptions.RedisError, OSError)  # what a call of the driver can raise
# Codes at the start of a reply, or (from a script in Redis 6.2) anywhere in it.
DEMOTED: Final = ("READONLY", "UNBLOCKED", "MASTERDOWN")

_KEYLESS: Final = {"PING", "INFO", "CONFIG", "TIME", "ROLE", "CLIENT", "SCRIPT", "CLUSTER", "ACL", "COMMAND"}

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


def router(servers: Servers) -> Router:
    """Return the router for what a URL says."""
    return SentinelRouter(servers) if servers.service else ClusterRouter(servers)


class SentinelRouter:
    """Sends everything to the primary, and asks the sentinels again once that seems to be another."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._sentinels = [Place(servers.sentinel_url(node), SENTINEL_TIMEOUT_S) for node in servers.nodes]
        self._primary: Place | None = None

    def route(self, commands: Sequence[Args]) -> Route:
        """See :class:`Router`."""
        primary = self._primary or (yield from self._find())
        try:
            replies = yield Send(primary, commands)
        except ERRORS:
            self._doubt(primary)
            raise
        if any(isinstance(reply, exceptions.ResponseError) and _demoted(reply) for reply in replies):
            self._doubt(primary)
        return replies

    def _find(self) -> Generator[Send, list[Any], Place]:
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._servers.service)
        failure: Exception | None = None
        for sentinel in list(self._sentinels):
            try:
                [reply] = yield Send(sentinel, [question])
            except ERRORS as error:
                failure = error
                continue
            if isinstance(reply, exceptions.ResponseError):
                failure = reply
            elif reply:
                node = Node(reply[0].decode(), int(reply[1]))
                self._primary = Place(self._servers.node_url(node), primary=True)
                return self._primary
        if failure is None:
            raise exceptions.ResponseError(f"the sentinels know no service {self._servers.service!r}")
        raise failure

    def _doubt(self, primary: Place) -> None:
        if self._primary == primary:
            self._primary = None
            # One that has lost touch with the others may name the old primary for ever: ask another first.
            self._sentinels = [*self._sentinels[1:], self._sentinels[0]]


def _demoted(error: exceptions.ResponseError) -> bool:
    return any(code in str(error) for code in DEMOTED)


class ClusterRouter:
    """Sends commands to the node that has their slot, and follows where it redirects to.

    A command without a key goes where the last one with a key went: a worker's are all for one queue.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._slot: int | None = None  # of the last key
        self._order = list(servers.nodes)  # in which to ask about the slots
        self._table: list[Node | None] = []  # slot -> node; empty: not known

    def route(self, commands: Sequence[Args]) -> Route:
        """See :class:`Router`."""
        node = yield from self._locate(commands)
        replies: list[Any] = [None] * len(commands)
        left = list(range(len(commands)))  # not carried out yet
        asking = False
        for _ in range(MOST_REDIRECTS + 1):
            batch = [commands[i] for i in left]
            if asking:
                batch = [each for command in batch for each in (("ASKING",), command)]
            try:
                answers = yield Send(self._place(node), batch)
            except ERRORS:
                self._forget(node)
                raise
            for i, answer in zip(left, answers[1::2] if asking else answers, strict=True):
                replies[i] = answer
            left = [i for i in left if isinstance(replies[i], exceptions.AskError)]  # MovedError is one
            if any(isinstance(reply, exceptions.ClusterDownError) for reply in replies):
                self._forget(node)
            if not left:
                return replies
            node, asking = self._redirected(replies[left[0]], node)
        self._forget(node)
        raise exceptions.ClusterDownError(f"the slot's nodes redirect to each other, the last to {node}")

    def _locate(self, commands: Sequence[Args]) -> Generator[Send, list[Any], Node]:
        table = self._table or (yield from self._learn())
        keys = [key for key in map(key_of, commands) if key is not None]
        slot = key_slot(keys[0]) if keys else self._slot
        if slot is None:
            return next(filter(None, table))
        self._slot = slot
        node = table[slot]
        if node is None:
            self._forget(None)
            raise exceptions.ClusterDownError(f"no node serves slot {slot}")
        return node

    def _redirected(self, answer: exceptions.AskError, by: Node) -> tuple[Node, bool]:
        """Return whom an answer names, and whether it is to be told that it was named."""
        node = Node(answer.host or by.host, answer.port)
        if not isinstance(answer, exceptions.MovedError):
            return node, True
        table = self._table
        if table:  # nobody forgot it meanwhile
            table[answer.slot_id] = node
        return node, False

    def _learn(self) -> Generator[Send, list[Any], list[Node | None]]:
        failure: Exception = exceptions.ClusterDownError("no node knows of any slots")
        for node in list(dict.fromkeys([*self._order, *self._servers.nodes])):
            try:
                [reply] = yield Send(self._place(node), [("CLUSTER", "SLOTS")])
            except ERRORS as error:
                failure = error
                continue
            if isinstance(reply, exceptions.ResponseError):
                failure = reply
            elif reply:
                table = slot_table(reply, node)
                others = dict.fromkeys(each for each in table if each not in {None, node})
                self._order = [*filter(None, others), node]  # the next to be asked is another
                self._table = table
                return table
        raise failure

    def _forget(self, node: Node | None) -> None:
        self._table = []
        if node in self._order:
            self._order = [*(each for each in self._order if each != node), node]

    def _place(self, node: Node) -> Place:
        return Place(self._servers.node_url(node))


def slot_table(ranges: Iterable[Sequence[Any]], asked: Node) -> list[Node | None]:
    """Return the node of each slot from a reply to CLUSTER SLOTS; ``asked`` is who gave it."""
    table: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, primary, *_ in ranges:
        host = primary[0].decode() if primary[0] else ""
        node = Node(host if host not in {"", "?"} else asked.host, int(primary[1]))
        table[first : last + 1] = [node] * (last + 1 - first)
    return table


def key_of(command: Args) -> bytes | None:
    """Return the first key of a command as this package writes them, None if it has none."""
    name = command[0]
    key: str | bytes | None = None
    if name in {"EVAL", "EVALSHA"}:
        key = command[3] if int(command[2]) else None
    elif name in {"XREAD", "XREADGROUP"}:
        # From the end: a worker may have any name.
        key = command[len(command) - command[::-1].index("STREAMS")]
    elif name in {"XINFO", "XGROUP"}:
        key = command[2]
    elif name not in _KEYLESS and len(command) > 1:
        key = command[1]
    return key.encode() if isinstance(key, str) else key
