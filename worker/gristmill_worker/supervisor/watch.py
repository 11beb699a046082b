"""What was changed: configurations (files) and models (folders)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gristmill_worker.models.records import SELF_TEST

Stamp = frozenset[tuple[str, int, int, int]] | None


class Watch:
    """Compares inode, time and size of files at each look; a change counts once it has stood for one look.

    Of a folder all files in it count: a model that is being copied changes until the last one is complete.
    What is hidden is work in progress, and what workers write themselves is nothing new to them.
    """

    def __init__(self) -> None:
        self._settled: dict[Path, Stamp] = {}
        self._seen: dict[Path, Stamp] = {}

    def look(self, paths: Iterable[Path]) -> set[Path]:
        """Return those of ``paths`` that have changed since the first look, or since they were returned."""
        changed = set()
        for path in paths:
            now = _stamp(path)
            before, self._seen[path] = self._seen.get(path, now), now
            settled = self._settled.setdefault(path, now)
            # A file that is gone is being replaced.
            if now is not None and now == before and now != settled:
                self._settled[path] = now
                changed.add(path)
        return changed


def _stamp(path: Path) -> Stamp:
    try:
        files = [file for file in path.iterdir() if _counts(file.name)] if path.is_dir() else [path]
        found = [(file.name, file.stat()) for file in files]
    except OSError:
        return None
    return frozenset((name, each.st_ino, each.st_mtime_ns, each.st_size) for name, each in found)


def _counts(name: str) -> bool:
    return not name.startswith((".", f"{SELF_TEST}-"))
