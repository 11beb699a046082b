"""Makes a CSV of real English paragraphs from the Python that runs it: the language reference, docstrings.

python python_docs.py OUT.csv [--rows N]

The columns are ``id`` and ``text``. Of the standard library only the reference's text is imported; the
sources are parsed. The same Python gives the same file.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

DEFAULT_ROWS = 3000
SHORTEST, LONGEST = 5, 200  # words
_SKIPPED = {
    "test",
    "tests",
    "encodings",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
}
_WORD = re.compile(r"[A-Za-z]{2,}")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of prose in ``text``, each on one line: no code, headings or tables."""
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.strip().splitlines()]
        if any(re.match(r">>>|\.\.\. |[=\-*~^+|]{3}|::=|@|:param|\.\. ", line) for line in lines):
            continue
        paragraph = " ".join(" ".join(lines).split())
        words = paragraph.split()
        letters = sum(character.isalpha() or character == " " for character in paragraph)
        if not SHORTEST <= len(words) <= LONGEST or letters < 0.8 * len(paragraph):
            continue
        if len(_WORD.findall(paragraph)) >= 0.6 * len(words) and paragraph[-1] in ".:!?)":
            yield paragraph


def reference() -> Iterator[str]:
    """Yield the paragraphs of the language reference, which every installation carries for help()."""
    for name in sorted(topics):
        yield from paragraphs(topics[name])


def docstrings() -> Iterator[str]:
    """Yield the paragraphs of the standard library's docstrings, in the order of the files."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.intersection(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of old escape sequences
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from paragraphs(ast.get_docstring(node) or "")


def collect(rows: int) -> list[str]:
    """Return ``rows`` different paragraphs, taken evenly from all that there are."""
    found = list(dict.fromkeys([*reference(), *docstrings()]))
    if len(found) <= rows:
        return found
    return [found[index * len(found) // rows] for index in range(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a CSV of paragraphs from this Python's documentation.")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument(
        "--rows", type=int, default=DEFAULT_ROWS, help="paragraphs at most (default %(default)s)"
    )
    arguments = parser.parse_args()
    texts = collect(arguments.rows)
    with arguments.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "text"])
        writer.writerows((f"doc-{index:05d}", text) for index, text in enumerate(texts))
    print(f"{len(texts)} paragraphs in {arguments.out}")  # noqa: T201 - what the command says


if __name__ == "__main__":
    main()
