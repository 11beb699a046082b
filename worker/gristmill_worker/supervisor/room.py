"""How much memory there is for another worker."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from gristmill_worker.topology.cgroups import memory_left_bytes
from gristmill_worker.topology.kernel import read_kilobytes

RESERVE_MB: Final = 256.0  # for Redis, the kernel, a larger batch


def is_room(needs_mb: float, loading: int, available_mb: float) -> bool:
    """Say whether another worker fits beside those of the same model.

    ``needs_mb`` is what one of these had for itself alone when it was ready, as pages that they share are
    there already; 0 where there is none. Those that load, ``loading``, have not taken yet what they need.
    """
    return available_mb - RESERVE_MB >= (loading + 1) * needs_mb


def available_mb(root: Path = Path("/")) -> float:
    """Return the memory that can be had without swapping, in MiB: the machine's, or what a cgroup leaves."""
    machine = read_kilobytes(root / "proc/meminfo", "MemAvailable")
    left = [each for each in (machine, memory_left_bytes(root)) if each is not None]
    return min(left, default=math.inf) / 2**20  # unknown: let it be tried
