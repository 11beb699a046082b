"""The Lua scripts: one per atomic operation. Each file's header documents its keys, arguments and return."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files


@cache
def source(name: str) -> str:
    """Return the text of the script ``name`` (``submit``, ``finish``, …)."""
    return files(__package__).joinpath(f"{name}.lua").read_text("utf-8")


@cache
def digest(name: str) -> str:
    """Return what ``EVALSHA`` knows the script by."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()
