"""Every Redis key of the wire contract. All keys of one queue share the hash tag ``{queue}``."""

from __future__ import annotations

import re
from typing import Final

from gristmill.errors import InvalidRequestError

QUEUES = "gm:queues"
GROUP = "workers"
HIGH: Final = "high"
DEFAULT: Final = "default"
PRIORITIES: Final = (HIGH, DEFAULT, "low")  # in the order in which they are served

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_queue(queue: str) -> str:
    """Return ``queue`` if it is a legal queue name, else raise :class:`InvalidRequestError`."""
    if not isinstance(queue, str) or not _NAME.fullmatch(queue):
        raise InvalidRequestError(
            f"queue name {queue!r} is not legal: use 1 to 64 of the characters A-Z a-z 0-9 . _ -"
        )
    return queue


def is_name(name: str) -> bool:
    """Say whether ``name`` may stand in a key as a queue's, client's or worker's name."""
    return _NAME.fullmatch(name) is not None


def requests(queue: str, priority: str = DEFAULT) -> str:
    name = f"gm:{{{queue}}}:requests"
    return name if priority == DEFAULT else f"{name}:{priority}"


def streams(queue: str) -> list[str]:
    """Return the request streams of a queue in the order of :data:`PRIORITIES`."""
    return [requests(queue, priority) for priority in PRIORITIES]


def result(queue: str, request_id: str) -> str:
    return f"gm:{{{queue}}}:result:{request_id}"


def reply(queue: str, client: str) -> str:
    return f"gm:{{{queue}}}:reply:{client}"


def dead(queue: str) -> str:
    return f"gm:{{{queue}}}:dead"


def cancelled(queue: str) -> str:
    return f"gm:{{{queue}}}:cancelled"


def worker(queue: str, name: str) -> str:
    return f"gm:{{{queue}}}:worker:{name}"


def processes(queue: str) -> str:
    return f"gm:{{{queue}}}:processes"


def config(queue: str) -> str:
    return f"gm:{{{queue}}}:config"
