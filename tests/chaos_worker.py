"""``gristmill-worker`` for the chaos test: some rows of the lookup graph make its engine misbehave.

Rows may be counted from the end, so a request with such a row still has an answer that can be computed.
"""

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from gristmill_worker.cli import main
from gristmill_worker.engines.base import Array, Engine
from gristmill_worker.engines.variant import Variant

SLOW, CRASH, HANG = -2, -3, -4
SLOW_S = 0.7

_load = Variant.load


def load(self: Variant, *args: Any, **options: Any) -> Engine:
    engine = _load(self, *args, **options)
    healthy = engine.run

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        lowest = inputs["ids"].min()
        if lowest == SLOW:
            time.sleep(SLOW_S)
        elif lowest == CRASH:
            os._exit(77)
        elif lowest == HANG:
            re.match(r"(a+)+$", "a" * 100 + "b")  # never returns, and lets no other thread run
        return healthy(inputs)

    engine.run = run  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    Variant.load = load  # type: ignore[method-assign]
    main()
