"""What a check found, how bad it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is, the best first."""

    OK = "ok"
    NOTE = "note"  # to know, or not to be seen from here
    WARNING = "warning"  # it works, slower or less safely than it could
    PROBLEM = "problem"  # it does not work, or loses work


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of what is, and one of what to do; ``fix`` is empty where nothing is to be done."""

    check: str
    level: Level
    found: str
    fix: str = ""


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of all."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
