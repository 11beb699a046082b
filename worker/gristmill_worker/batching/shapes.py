"""The fixed shapes that an engine is warmed up for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gristmill.errors import InputFileError
from gristmill_worker.engines.base import Shape

BATCHES: Final = (1, 2, 4, 8, 16, 32)
SEQUENCES: Final = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MAX_TOKENS: Final = 2048


def default_shapes(max_length: int, max_tokens: int = MAX_TOKENS) -> list[Shape]:
    """Return a grid of (batch, sequence) up to ``max_length``, each of at most ``max_tokens`` tokens.

    Batches of one are there for every length, also where ``max_length`` alone exceeds ``max_tokens``.
    """
    sequences = [*(s for s in SEQUENCES if s < max_length), max_length]
    return [(b, s) for s in sequences for b in BATCHES if b == 1 or b * s <= max_tokens]


def check_shapes(shapes: Sequence[Shape], max_length: int) -> list[Shape]:
    """Return ``shapes`` if one holds the longest text, else raise :class:`InputFileError`."""
    longest = max(sequence for _, sequence in shapes)
    if longest != max_length:
        raise InputFileError(
            f"the longest configured shape has {longest} tokens, the model takes {max_length}: "
            f"let the longest entry of batch.shapes be [1, {max_length}]"
        )
    return sorted(set(shapes))
