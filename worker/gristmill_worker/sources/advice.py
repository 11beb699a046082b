"""Settings of a Redis that lose requests sooner or later; a worker says so when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.driver import ERRORS, Connections
from gristmill_worker.telemetry import logger


@dataclass(frozen=True, slots=True)
class Risk:
    """One such setting: the name that logs have for it, what was found, and what to do."""

    event: str
    found: str
    advice: str


def advise(redis: Connections) -> None:
    """Log a warning for each of :func:`risks`. Raises one of ERRORS only while Redis is away."""
    redis.call("PING")
    for risk in risks(redis):
        logger().warning(risk.event, found=risk.found, advice=risk.advice)


def risks(redis: Connections) -> list[Risk]:
    """Return what loses requests: evicting keys, keeping nothing. What may not be seen is not judged."""
    found = []
    policy = (info(redis, "memory") or {}).get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            Risk(
                "redis_may_evict",
                f"maxmemory-policy {policy}",
                "CONFIG SET maxmemory-policy noeviction: a full memory then refuses and drops nothing",
            )
        )
    if (info(redis, "persistence") or {}).get("aof_enabled", "1") == "0" and setting(redis, "save") == "":
        found.append(
            Risk(
                "redis_keeps_nothing",
                "neither an append-only file nor snapshots",
                "CONFIG SET appendonly yes: otherwise a restart of Redis loses what waits and its results",
            )
        )
    return found


def info(redis: Connections, section: str) -> dict[str, str] | None:
    """Return a section of INFO; None where this user may not see it."""
    try:
        lines = redis.call("INFO", section).decode("utf-8", "replace").splitlines()
    except ERRORS:
        return None
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def setting(redis: Connections, name: str) -> str | None:
    """Return a setting of Redis; None where this user may not see it, as a rule where others run it."""
    try:
        found = redis.call("CONFIG", "GET", name)
    except ERRORS:
        return None
    return found[1].decode("utf-8", "replace") if len(found) == 2 else None
