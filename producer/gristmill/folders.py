"""Folders for work in progress, which no interruption leaves behind."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

TOKEN_BYTES: Final = 8  # of a name's random end, two digits each


@contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in ``parent``, for this user only, which is removed at the end; raise OSError.

    The name is known before there is a folder: Ctrl-C at any instant, also between its creation and the next
    statement, removes it (:func:`tempfile.mkdtemp` leaves it then).
    """
    folder = parent / f"{prefix}{secrets.token_hex(TOKEN_BYTES)}"
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
