"""What a client process has received: the reply stream's entries, sorted to those who wait for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gristmill import wire
from gristmill.errors import WireError
from gristmill.wire import Result

UNCLAIMED: Final = 10_000  # results kept for a later result() call; older ones are in their keys


@dataclass(slots=True)
class Mailbox:
    """What one client process has received on one queue."""

    queue: str
    key: str
    last_id: str = "0"
    renew_at: float = 0.0
    version: int = 0
    awaited: dict[str, dict[str, Result]] = field(default_factory=dict)  # ID -> where to put its result
    unclaimed: OrderedDict[str, Result] = field(default_factory=OrderedDict)

    def read_command(self, block_ms: int) -> tuple[Any, ...]:
        return ("XREAD", "COUNT", 100, "BLOCK", block_ms, "STREAMS", self.key, self.last_id)

    def feed(self, reply: Any) -> None:
        """Take in what XREAD returned."""
        for _, entries in reply or ():
            for entry_id, fields in entries:
                self.last_id = entry_id.decode()
                for result in _results(fields):
                    sink = self.awaited.pop(result.id, None)
                    (self.unclaimed if sink is None else sink)[result.id] = result
            self.version += 1
        while len(self.unclaimed) > UNCLAIMED:
            self.unclaimed.popitem(last=False)


def _results(fields: Sequence[bytes]) -> list[Result]:
    try:
        return wire.decode_results(wire.pairs(fields).get(b"results", b"[]"))
    except WireError:  # not written by finish.lua; whoever waits will look at the result key
        return []
