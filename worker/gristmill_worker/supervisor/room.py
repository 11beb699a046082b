"""How much memory there is for another worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gristmill_worker.supervisor.child import Child, Phase
from gristmill_worker.topology.cgroups import memory_left_bytes
from gristmill_worker.topology.kernel import read_kilobytes

RESERVE_MB: Final = 256.0  # for Redis, the kernel, a larger batch


def is_room(kin: Sequence[Child], available_mb: float) -> bool:
    """Say whether another worker fits beside its ``kin``, the workers of the same model.

    It needs what one of these has for itself alone, as pages that they share are there already; of the first
    of a model nobody knows. Those that load have not taken yet what they need.
    """
    needs_mb = max((child.memory.get("uss_mb", 0.0) for child in kin), default=0.0)
    loading = sum(child.phase is Phase.LOADING for child in kin)
    return available_mb - RESERVE_MB >= (loading + 1) * needs_mb


def available_mb(root: Path = Path("/")) -> float:
    """Return the memory that can be had without swapping, in MiB: the machine's, or what a cgroup leaves."""
    machine = read_kilobytes(root / "proc/meminfo", "MemAvailable")
    left = [each for each in (machine, memory_left_bytes(root)) if each is not None]
    return min(left, default=math.inf) / 2**20  # unknown: let it be tried
