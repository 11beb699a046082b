"""``gristmill-worker`` with faults on demand: run as a program, with the worker's arguments.

The engine ends the whole process where a batch holds the token of the word "wheel", as a crash of a native
library does; at the token of "stone" it never returns and lets no other thread run; at "oats" it fails; at
"barley" it lacks memory, at "sack" only for the first two times that one runs alone; at "slow" it takes its
time. The tokenizer raises on a text with "explode".
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoints import vocabulary
from gristmill_worker.cli import main
from gristmill_worker.engines.base import Array, Engine, EngineError
from gristmill_worker.engines.variant import Variant
from gristmill_worker.tasks.text import TextEncoder

WORDS = ("wheel", "stone", "oats", "barley", "sack", "slow")
WHEEL, STONE, OATS, BARLEY, SACK, SLOW = (vocabulary()[word] for word in WORDS)
CRASHED = 77

_load = Variant.load
_encode = TextEncoder.encode


def load(self: Variant, *args: Any, **options: Any) -> Engine:
    engine = _load(self, *args, **options)
    healthy = engine.run
    times = 0  # that a sack ran alone

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if (inputs["input_ids"] == WHEEL).any():
            os._exit(CRASHED)
        if (inputs["input_ids"] == STONE).any():
            re.match(r"(a+)+$", "a" * 100 + "b")
        if (inputs["input_ids"] == OATS).any():
            raise EngineError("there is nothing to be done")
        if (inputs["input_ids"] == BARLEY).any():
            raise EngineError.of("the engine", RuntimeError("std::bad_alloc"))
        sacks = (inputs["input_ids"] == SACK).any(axis=1)
        nonlocal times
        times += bool(sacks.all())  # padding repeats the first text
        if sacks.any() and times < 3:
            raise MemoryError
        if (inputs["input_ids"] == SLOW).any():
            time.sleep(0.1)
        return healthy(inputs)

    engine.run = run  # type: ignore[method-assign]
    return engine


def encode(self: TextEncoder, bodies: Sequence[Mapping[str, Any]]) -> Any:
    if any("explode" in str(body.get("text")) for body in bodies):
        raise RuntimeError("the tokenizer is broken")
    return _encode(self, bodies)


if __name__ == "__main__":
    Variant.load = load  # type: ignore[method-assign]
    TextEncoder.encode = encode  # type: ignore[method-assign]
    main()
