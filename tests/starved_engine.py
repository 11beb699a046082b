"""``python starved_engine.py ENGINE MODEL`` runs a batch that there is no memory for, then again with memory.

Prints JSON: the error, whether it may pass, and how far the later answer is from one of a healthy engine.
"""

import json
import resource
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import openvino as ov

from gristmill_worker.engines.base import Engine, EngineError, example_inputs
from gristmill_worker.engines.onnxruntime import OnnxRuntimeEngine
from gristmill_worker.engines.openvino import OpenVinoEngine
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.manifest import Manifest

SMALL = (64, 16)
LARGE = (64, 128)
CONFIG = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}  # as a worker has it: infer() then drops errors


def make(name: str, path: Path, manifest: Manifest) -> Engine:
    """Return an engine that has not run ``LARGE``, as loading would have it do."""
    if name == "onnxruntime":
        return OnnxRuntimeEngine(ort.InferenceSession(str(path)), manifest, [SMALL, LARGE])
    request = ov.Core().compile_model(path, "CPU", CONFIG).create_infer_request()
    return OpenVinoEngine(manifest, "fp32", dict.fromkeys([SMALL, LARGE], request), ())


def main() -> None:
    name, model = sys.argv[1], Path(sys.argv[2])
    manifest = manifests.load(model)
    inputs = example_inputs(manifest.inputs, LARGE)
    output = manifest.outputs[0].name
    expected = make(name, model / manifest.file, manifest).run(inputs)[output]
    engine = make(name, model / manifest.file, manifest)
    engine.run(example_inputs(manifest.inputs, SMALL))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    found = {"error": "", "retryable": False}
    try:
        engine.run(inputs)
    except EngineError as error:
        found = {"error": str(error), "retryable": error.retryable}
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    later = engine.run(inputs)[output]
    print(json.dumps({**found, "difference": float(np.abs(later - expected).max())}))


if __name__ == "__main__":
    main()
