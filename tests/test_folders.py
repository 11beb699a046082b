"""Folders for work in progress, interrupted at every instant."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gristmill.folders import scratch


class Interruption:
    """Raises KeyboardInterrupt after so many of the interpreter's steps, as a signal does between any two."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self, _frame: FrameType, event: str, _arg: Any) -> "Interruption":
        self.left -= event in {"call", "line", "c_return"}  # where the interpreter looks for signals
        if self.left < 0:
            sys.settrace(None)
            sys.setprofile(None)
            raise KeyboardInterrupt
        return self


def enter(parent: Path, steps: int) -> bool:
    """Make a folder, interrupted after ``steps``; say whether it was before the folder could be used."""
    interruption = Interruption(steps)
    sys.settrace(interruption)
    sys.setprofile(interruption)  # also between a call of C code and what follows it
    try:
        with scratch(parent, "work-"):
            sys.settrace(None)
            sys.setprofile(None)
            return False
    except KeyboardInterrupt:
        return True


def test_an_interruption_at_any_instant_leaves_no_folder(tmp_path: Path) -> None:
    steps = 0
    while enter(tmp_path, steps):
        assert not list(tmp_path.iterdir()), f"after {steps} steps"
        steps += 1
    assert steps > 20


def test_a_folder_is_ours_alone_and_ends_with_what_is_in_it(tmp_path: Path) -> None:
    with scratch(tmp_path, "work-") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.name.startswith("work-")
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("half")
    assert not list(tmp_path.iterdir())
    with pytest.raises(NotADirectoryError), scratch(Path("/dev/null"), "work-"):
        pass
