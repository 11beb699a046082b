"""Files of ``/proc`` and ``/sys``: what is not there, or not allowed to be read, is None."""

from __future__ import annotations

from pathlib import Path

from gristmill_worker.cpus import parse_cpu_list


def read_line(path: Path) -> str | None:
    """Return the text of a small file without the end of its line."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Return the number in a file; None also if it is no number, such as ``max``."""
    try:
        return int(read_line(path) or "")
    except ValueError:
        return None


def read_list(path: Path) -> tuple[int, ...] | None:
    """Return the numbers of a list such as ``0-3,8``; an empty file is an empty list."""
    text = read_line(path)
    if not text:
        return None if text is None else ()
    try:
        return parse_cpu_list(text)
    except ValueError:
        return None


def read_kilobytes(path: Path, name: str) -> int | None:
    """Return the bytes that a line ``name: N kB`` of a meminfo file tells."""
    for line in (read_line(path) or "").splitlines():
        label, _, value = line.partition(":")
        if label.split()[-1:] == [name]:
            number = value.split()[:1]
            return int(number[0]) * 1024 if number and number[0].isdigit() else None
    return None
