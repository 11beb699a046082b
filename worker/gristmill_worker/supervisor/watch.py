"""Files that were changed: configurations and models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[int, int, int] | None


class Watch:
    """Compares inode, time and size of files at each look; a change counts once it has stood for one look."""

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
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
