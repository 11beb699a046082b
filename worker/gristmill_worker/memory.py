"""How much memory this process uses."""

from __future__ import annotations

import os
from pathlib import Path


def resident_mb() -> float:
    """Return the memory that this process has in use, in MiB."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
