"""Real English that is on every machine, to measure models with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_SHORTEST: Final = 5  # words of a paragraph


def documentation() -> Iterator[str]:
    """Yield paragraphs of the language reference that every Python carries for ``help()``."""
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte

    blocks = (" ".join(block.split()) for text in topics.values() for block in re.split(r"\n\s*\n", text))
    return (block for block in dict.fromkeys(blocks) if len(block.split()) >= _SHORTEST)
