"""``gristmill-worker`` with faults on demand: run as a program, with the worker's arguments.

The engine ends the whole process where a batch holds the token of the word "wheel", as a crash of a native
library does; the tokenizer raises on a text with "explode".
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoints import vocabulary
from gristmill_worker.cli import main
from gristmill_worker.engines import onnxruntime
from gristmill_worker.engines.base import Array
from gristmill_worker.tasks.text import TextEncoder

WHEEL = vocabulary()["wheel"]
CRASHED = 77

_run = onnxruntime.OnnxRuntimeEngine.run
_encode = TextEncoder.encode


def run(self: onnxruntime.OnnxRuntimeEngine, inputs: Mapping[str, Array]) -> dict[str, Array]:
    if (inputs["input_ids"] == WHEEL).any():
        os._exit(CRASHED)
    return _run(self, inputs)


def encode(self: TextEncoder, bodies: Sequence[Mapping[str, Any]]) -> Any:
    if any("explode" in str(body.get("text")) for body in bodies):
        raise RuntimeError("the tokenizer is broken")
    return _encode(self, bodies)


if __name__ == "__main__":
    onnxruntime.OnnxRuntimeEngine.run = run  # type: ignore[method-assign]
    TextEncoder.encode = encode  # type: ignore[method-assign]
    assert Path(__file__).name == "faulty_worker.py"
    main()
