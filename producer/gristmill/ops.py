"""What the core's generators ask of the client that runs them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gristmill.mailbox import Mailbox

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Command:
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    keys: Sequence[str]
    args: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Read:
    """Read the mailbox's reply stream and feed the mailbox, unless its version is no longer ``seen``.

    One caller reads at a time; the others wait until it is back.
    """

    mailbox: Mailbox
    block_ms: int
    seen: int


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


Op = Command | Script | Read | Sleep
Steps = Generator[Op, Any, T]
