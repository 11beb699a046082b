"""Inputs for tests of bulk scoring, with rows of every kind that a reader has to find its way through."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from gristmill.bulk import Summary


def write_input(path: Path, seed: int = 1, rows: int = 3000) -> Path:
    """Write a CSV file, or JSON Lines where the name says so, some of its rows bad."""
    chooser = random.Random(seed)
    with path.open("wb") as file:
        jsonl = path.name.startswith("jsonl") or ".jsonl" in path.name
        if not jsonl:
            file.write(b"\xef\xbb\xbfid,text\r\n")
        for i in range(rows):
            text = " ".join(chooser.choices(["mill", "grain", "zwölf 🌾"], k=chooser.randint(1, 8)))
            kind = chooser.randrange(40)
            if jsonl:
                lines = ["", "nonsense", '{"id": 1}'] if kind < 3 else []
                line = lines[kind] if lines else json.dumps({"id": i, "text": text})
                file.write(line.encode() + b"\n")
            else:
                odd = [f'{i},"{text}\r\n{text}"', f"{i}", f"{i},", f'{i},"a"b', f"{i},a,b,c", "", f"{i},a\rx"]
                line = odd[kind] if kind < len(odd) else f"{i},{text}"
                file.write(line.encode() + (b"\xff\n" if kind == 9 else b"\n"))
    return path


class Cut(Exception):  # noqa: N818 - no error
    """What a test ends a run with."""


def cut_at(rows: int) -> Callable[[Summary], None]:
    def on_progress(summary: Summary) -> None:
        if summary.rows == rows:
            raise Cut

    return on_progress
