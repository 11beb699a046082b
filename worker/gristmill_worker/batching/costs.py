"""What a batch of a shape costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gristmill_worker.engines.base import Shape

# Fitted to one-core timings of a 6-layer encoder: a call costs as much as two dozen tokens before the first
# one is computed, and attention adds to each token in proportion to the sequence.
CALL_TOKENS: Final = 24.0
ATTENTION_TOKENS: Final = 2048.0


def formula(shapes: Sequence[Shape]) -> dict[Shape, float]:
    """Return relative costs, in tokens' worth of time, for an engine that was not measured."""
    return {
        (batch, sequence): CALL_TOKENS + batch * sequence * (1.0 + sequence / ATTENTION_TOKENS)
        for batch, sequence in shapes
    }
