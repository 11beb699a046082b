"""The static int8 form that DeepSparse runs fastest; onnxruntime runs it too."""

from __future__ import annotations

from typing import Final

from gristmill_worker.models import inspect_onnx
from gristmill_worker.models.manifest import MODEL_FILE
from gristmill_worker.models.pruning import Pruning
from gristmill_worker.models.quantize.job import Job, Made
from gristmill_worker.models.quantize.ort_graph import weights_note
from gristmill_worker.models.sparse_int8 import WeightOptions, write_sparse_int8

_NOTE: Final = (
    "Pruning without training after it: what a model that was trained to be sparse would gain in speed, and "
    "no use for its answers."
)


def make(job: Job) -> Made:
    """Quantize with one static range for each activation; see :mod:`gristmill_worker.models.sparse_int8`."""
    job.say("calibrating")
    share, reduce_range = job.options.sparsity, job.options.reduce_range
    matrices = write_sparse_int8(
        job.model_dir / job.manifest.file,
        job.batches(),
        job.folder / MODEL_FILE,
        WeightOptions(Pruning(share), levels=63 if reduce_range else 127),
        threads=job.threads,
    )
    how = f"{matrices} matrices, {weights_note(reduce_range)}"
    if share:
        how += f", {share:.0%} of them pruned in blocks of 4"
    return Made(
        file=MODEL_FILE,
        files=(MODEL_FILE,),
        engines=("deepsparse", "onnxruntime"),
        method=f"static int8, ranges of {len(job.calibration)} texts, {how}",
        sparsity=inspect_onnx.sparsity(inspect_onnx.read_graph(job.folder / MODEL_FILE)),
        notes=(_NOTE,) if share else (),
    )
