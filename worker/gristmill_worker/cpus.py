"""CPU lists, as taskset and cpusets write them."""

from __future__ import annotations


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the CPUs in e.g. ``0,2-3``; raise ValueError if ``text`` is no such list."""
    cpus: dict[int, None] = {}
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cpus |= dict.fromkeys(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ValueError(f"{text!r} is not a CPU list such as 0,2-3") from None
    return tuple(cpus)
