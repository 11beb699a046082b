"""Settings of a Redis that lose requests sooner or later: said once, when a worker starts."""

from __future__ import annotations

from gristmill.driver import ERRORS, Connections
from gristmill_worker.telemetry import logger


def advise(redis: Connections) -> None:
    """Log a warning for a Redis that evicts keys or keeps nothing; what it does not tell is not judged.

    Raises one of ERRORS only while Redis is away.
    """
    redis.call("PING")
    policy = _info(redis, "memory").get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        logger().warning(
            "redis_may_evict",
            policy=policy,
            advice="CONFIG SET maxmemory-policy noeviction: a full memory then refuses and drops nothing",
        )
    if _info(redis, "persistence").get("aof_enabled", "1") == "0" and not _saves(redis):
        logger().warning(
            "redis_keeps_nothing",
            advice="CONFIG SET appendonly yes: otherwise a restart of Redis loses what waits and its results",
        )


def _info(redis: Connections, section: str) -> dict[str, str]:
    try:
        lines = redis.call("INFO", section).decode("utf-8", "replace").splitlines()
    except ERRORS:  # not permitted
        return {}
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _saves(redis: Connections) -> bool:
    """Say whether snapshots are taken; in doubt they are."""
    try:
        found = redis.call("CONFIG", "GET", "save")
    except ERRORS:  # not permitted: as a rule by who runs it for others, and keeps it
        return True
    return len(found) < 2 or bool(found[1])
