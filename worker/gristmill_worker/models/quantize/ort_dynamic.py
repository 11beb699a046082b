"""int8 with ranges that are found while running: by token, or by batch."""

from __future__ import annotations

from gristmill_worker.models import inspect_onnx
from gristmill_worker.models.quantize.job import Job, Made
from gristmill_worker.models.quantize.ort_graph import (
    Activation,
    Batch,
    Rows,
    layers_to_quantize,
    quantized,
    save_form,
    weights_note,
)


def make_rows(job: Job) -> Made:
    """Scale every token's vector by its own largest value: exact for outliers, and blind to neighbours."""
    return _make(job, Rows(), ("onnxruntime", "openvino"), "one range a token")


def make_batch(job: Job) -> Made:
    """Take one range over the whole batch, as onnxruntime's own dynamic quantization does."""
    note = (
        "Its ranges are taken over the whole batch, so a text's answer depends on the texts beside it: "
        "serve it where that does not matter, or make the form int8-rows, which has one range a token."
    )
    return _make(job, Batch(), ("onnxruntime",), "one range a batch", note)


def _make(job: Job, activation: Activation, engines: tuple[str, ...], ranges: str, *notes: str) -> Made:
    graph = inspect_onnx.read_graph(job.model_dir / job.manifest.file)
    layers = layers_to_quantize(graph)
    reduce_range = job.options.reduce_range
    model = quantized(graph, {layer.name: activation for layer in layers}, reduce_range=reduce_range)
    file = save_form(model, job.folder)
    return Made(
        file=file,
        files=(file,),
        engines=engines,
        method=f"int8 while running, {ranges}, {weights_note(reduce_range)}",
        sparsity=inspect_onnx.sparsity(model),
        notes=notes,
    )
