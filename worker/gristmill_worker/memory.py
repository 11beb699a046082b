"""How much memory this process uses."""

from __future__ import annotations

import os
from pathlib import Path


def resident_mb() -> float:
    """Return the memory that this process has in use, in MiB."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory_mb() -> dict[str, float]:
    """Return what this process has in use, in MiB: resident, its fair share of that, its own alone."""
    names = {"Rss:": "rss_mb", "Pss:": "pss_mb", "Private_Clean:": "uss_mb", "Private_Dirty:": "uss_mb"}
    found = dict.fromkeys(names.values(), 0.0)
    for line in Path("/proc/self/smaps_rollup").read_text("ascii").splitlines():
        name, _, rest = line.partition(" ")
        if name in names:
            found[names[name]] += int(rest.split()[0]) / 1024
    return {name: round(value, 1) for name, value in found.items()}
