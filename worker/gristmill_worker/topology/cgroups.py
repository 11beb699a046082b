"""What control groups (version 2, and 1 where that is still in use) leave of the machine to this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gristmill_worker.topology.kernel import read_int, read_line, read_list

V2: Final = ""  # what /proc/self/cgroup has in place of the names of controllers
_NO_LIMIT: Final = 2**62  # version 1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True)
class Limits:
    """The strictest limits of the process's own group and of those around it; None where there is none."""

    cpus: float | None = None  # CPU seconds per second
    cpus_file: str | None = None  # that says so
    cpu_set: tuple[int, ...] | None = None
    memory_bytes: int | None = None


def read_limits(root: Path) -> Limits:
    """Read them below ``root``, ``/`` for this process.

    A container sees its own group at the top of the mount, a process outside of one is deep in the tree;
    every group on the way up to the mount can hold the limit that counts.
    """
    quota, where = min(
        (found for group in _groups(root, "cpu") if (found := _quota(group)) is not None),
        default=(None, None),
        key=lambda found: found[0],
    )
    cpu_sets = (
        read_list(group / name)
        for group in _groups(root, "cpuset")
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus")
    )
    memory = (
        read_int(group / name)
        for group in _groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    )
    return Limits(
        cpus=quota,
        cpus_file=None if where is None else f"/{where.relative_to(root)}",
        cpu_set=next((found for found in cpu_sets if found), None),
        memory_bytes=min(
            (limit for limit in memory if limit is not None and limit < _NO_LIMIT), default=None
        ),
    )


def memory_left_bytes(root: Path) -> int | None:
    """Return what the tightest memory limit leaves, caches that can be dropped included; None: no limit."""
    left = []
    for group in _groups(root, "memory"):
        for limit_name, used_name, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = read_int(group / limit_name), read_int(group / used_name)
            if limit is not None and used is not None and limit < _NO_LIMIT:
                stat = dict(
                    line.split(" ", 1) for line in (read_line(group / "memory.stat") or "").splitlines()
                )
                left.append(limit - used + int(stat.get(cache, 0)))
    return min(left, default=None)


def _quota(group: Path) -> tuple[float, Path] | None:
    """Return the group's limit in CPUs, and the file that says so."""
    file = group / "cpu.max"
    line = read_line(file)
    if line is None:
        file = group / "cpu.cfs_quota_us"
        line = f"{read_line(file)} {read_line(group / 'cpu.cfs_period_us')}"
    quota, _, period = line.partition(" ")  # "150000 100000"; "max 100000" and "-1 100000" are no limit
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):
        return None
    return int(quota) / int(period), file


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's own group with ``controller``, then of those around it."""
    mine: dict[str, str] = {}
    for line in (read_line(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        mine |= dict.fromkeys(names.split(","), path)
    for line in (read_line(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        # https://docs.kernel.org/filesystems/proc.html: root and mount point are the fourth and fifth field.
        fields, (kind, *more) = before.split(), (after.split() or [""])
        if len(fields) < 5 or kind not in ("cgroup", "cgroup2"):
            continue
        options = more[-1].split(",") if more else []
        name = V2 if kind == "cgroup2" else controller
        if name not in mine or (kind == "cgroup" and controller not in options):
            continue
        top = root / fields[4].lstrip("/")
        # Below another root (a container without a namespace for groups) the path begins with that root.
        inside = Path(mine[name]).parts[1:]
        shown = Path(fields[3]).parts[1:]
        below = inside[len(shown) :] if inside[: len(shown)] == shown else ()
        for depth in range(len(below), -1, -1):
            yield top.joinpath(*below[:depth])
