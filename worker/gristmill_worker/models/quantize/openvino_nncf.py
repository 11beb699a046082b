"""int8 for OpenVINO by NNCF: static ranges from calibration texts, attention left in float."""

from __future__ import annotations

import logging
import os
from typing import Any, Final

import nncf
import openvino as ov
from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix

from gristmill_worker.models.manifest import ModelRefusedError
from gristmill_worker.models.quantize.job import Job, Made
from gristmill_worker.models.quantize.quiet import quiet
from gristmill_worker.tune.measure import bound

FILE: Final = "model.xml"  # the weights are beside it, in a file of the same stem
WEIGHTS_FILE: Final = "model.bin"
_MATERIAL: Final = frozenset({"Constant", "Convert", "Reshape", "Transpose", "Unsqueeze"})

nncf.set_log_level(logging.ERROR)


def make(job: Job) -> Made:
    """Quantize weights and activations; see ``Options.attention`` for what is left out.

    With the multiplications inside the attention in int8 and the rest in bf16, OpenVINO answers wrongly where
    the sequence is as long as a head is wide.
    """
    job.say("quantizing with NNCF")
    options = job.options
    try:
        model = ov.Core().read_model(job.model_dir / job.manifest.file)
        left_out = [] if options.attention else _attention(model)
        # NNCF says nothing of threads to OpenVINO, which takes the CPUs that it is left.
        with quiet(), bound(sorted(os.sched_getaffinity(0))[: job.threads]):
            made = nncf.quantize(
                model,
                nncf.Dataset(job.batches()),
                subset_size=len(job.calibration),
                model_type=nncf.ModelType.TRANSFORMER,
                ignored_scope=nncf.IgnoredScope(names=left_out) if left_out else None,
                advanced_parameters=AdvancedQuantizationParameters(
                    overflow_fix=OverflowFix.ENABLE if options.reduce_range else OverflowFix.DISABLE
                ),
            )
        # What stays in float stays as it was: OpenVINO would make it half precision.
        ov.save_model(made, job.folder / FILE, compress_to_fp16=False)
    except Exception as error:  # OpenVINO raises RuntimeError for all there is, NNCF a dozen classes
        raise ModelRefusedError(f"NNCF {nncf.__version__} cannot quantize the model: {error}") from error
    bits = 7 if options.reduce_range else 8
    method = (
        f"NNCF int8, ranges of {len(job.calibration)} texts, {bits}-bit weights, "
        f"{len(left_out)} multiplications of the attention in float"
    )
    return Made(FILE, (FILE, WEIGHTS_FILE), ("openvino",), method, job.manifest.sparsity)


def _attention(model: Any) -> list[str]:
    """Return the names of the multiplications of two activations."""
    return [
        node.get_friendly_name()
        for node in model.get_ordered_ops()
        if node.get_type_name() == "MatMul" and not any(map(_is_constant, node.input_values()))
    ]


def _is_constant(value: Any) -> bool:
    """Say whether ``value`` is a weight, whatever its shape and type were changed by."""
    node = value.get_node()
    kind = node.get_type_name()
    return kind == "Constant" or (kind in _MATERIAL and _is_constant(node.input_value(0)))
