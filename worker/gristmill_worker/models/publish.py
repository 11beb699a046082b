"""Making a model directory in one step: it appears complete, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gristmill.errors import InputFileError
from gristmill.folders import scratch
from gristmill_worker.models.manifest import FILE_NAME


@contextmanager
def staged(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield an empty folder beside ``out`` which becomes ``out`` when the block ends without an error.

    Raises :class:`InputFileError` if ``out`` exists. With ``force`` it is replaced, if it is a model
    directory or an empty folder: nothing else is ever deleted.
    """
    out = out.absolute()
    _check_free(out, force=force)
    with ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(scratch(out.parent, f".{out.name}."))
        except OSError as error:
            raise InputFileError(f"{out} cannot be made: {error.strerror}") from error
        yield folder
        folder.chmod(0o755)  # it was for us alone, and workers may run as another user
        _check_free(out, force=force)  # again: much time may have passed
        _swap(folder, out)


def _check_free(out: Path, *, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if not force:
        raise InputFileError(f"{out} exists: name another directory, or replace it with --force")
    if out.is_symlink() or not out.is_dir():
        raise InputFileError(f"{out} exists and is no directory: it is not replaced")
    if any(out.iterdir()) and not (out / FILE_NAME).is_file():
        raise InputFileError(f"{out} is not a model directory ({FILE_NAME} is missing): it is not replaced")


def _swap(folder: Path, out: Path) -> None:
    if not out.exists():
        folder.rename(out)
        return
    # Two renames: a reader meets the old directory, for an instant none, then the new one; never a mixture.
    with scratch(out.parent, f".{out.name}.old.") as old:
        try:
            out.rename(old / out.name)
            folder.rename(out)
        except BaseException:
            if not out.exists() and (old / out.name).exists():
                (old / out.name).rename(out)
            raise
