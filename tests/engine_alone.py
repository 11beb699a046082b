"""An engine without queue and tokenizer, over and over on one core: what a machine's cores give at the most.

Usage: python tests/engine_alone.py MODEL ENGINE CORE SECONDS. Says when it is ready, waits for a line on its
standard input, and prints batches per second.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gristmill_worker.engines.base import example_inputs
from gristmill_worker.loading import load_model
from gristmill_worker.service import keep_to
from gristmill_worker.settings import Settings
from gristmill_worker.telemetry import configure_logging


def main() -> None:
    model, engine, core, seconds = sys.argv[1:]
    configure_logging("error")
    settings = Settings(queue="none", model=Path(model), engine=engine, cores=core)
    keep_to(settings)
    loaded = load_model(settings)
    at_hand = [shape for shape in loaded.engine.shapes if shape[0] > 1 and shape[1] <= 64]
    batches = [example_inputs(loaded.manifest.inputs, shape) for shape in at_hand]
    print("ready", flush=True)
    sys.stdin.readline()
    runs, began = 0, time.monotonic()
    while time.monotonic() < began + float(seconds):
        for batch in batches:
            loaded.engine.run(batch)
        runs += len(batches)
    print(runs / (time.monotonic() - began), flush=True)


if __name__ == "__main__":
    main()
