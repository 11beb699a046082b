"""Which node of a Redis Cluster has a key; no I/O (see :mod:`gristmill.routing`)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Final

from redis import exceptions
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from gristmill.routing import ERRORS, Args, Place, Route, Send
from gristmill.urls import Node, Servers

MOST_REDIRECTS: Final = 5

_KEYLESS: Final = {"PING", "INFO", "CONFIG", "TIME", "ROLE", "CLIENT", "SCRIPT", "CLUSTER", "ACL", "COMMAND"}


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
