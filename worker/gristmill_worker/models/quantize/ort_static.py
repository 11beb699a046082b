"""int8 for onnxruntime with ranges from calibration texts; the layers that suffer most stay in float."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Final

from onnx import ModelProto, ValueInfoProto
from onnxruntime.quantization.calibrate import HistogramCollector

from gristmill_worker.models import inspect_onnx
from gristmill_worker.models.answers import Answer
from gristmill_worker.models.calibration import activation_ranges
from gristmill_worker.models.graph_builder import save_model
from gristmill_worker.models.inspect_onnx import Probe
from gristmill_worker.models.limits import as_figure, by_cosine
from gristmill_worker.models.quantize.job import Job, Made
from gristmill_worker.models.quantize.ort_graph import (
    Layer,
    Range,
    layers_to_quantize,
    quantized,
    save_form,
    weights_note,
)
from gristmill_worker.models.quantize.quiet import quiet
from gristmill_worker.tasks.base import Encoded

PERCENTILE: Final = 99.999  # outliers carry meaning in transformers: less than this ruins the answers
_BINS: Final = 2048
_QUANTIZED_BINS: Final = 128
_EFFECT_STEP: Final = 4  # one layer alone is tried on every fourth text: it is only ranked by that
_NAMED: Final = 6  # layers in a sentence


def make(job: Job) -> Made:
    """Calibrate, quantize every linear layer, and take the worst back until the answers are near enough."""
    graph = inspect_onnx.read_graph(job.model_dir / job.manifest.file)
    layers = layers_to_quantize(graph)
    job.say("finding the ranges of values")
    sources = list(dict.fromkeys(layer.source for layer in layers))
    found = _ranges(graph, sources, job)
    ranges = {layer.name: found[layer.source] for layer in layers}
    kept, notes = _Search(graph, layers, ranges, job).run()
    chosen = {name: value for name, value in ranges.items() if name not in kept}
    model = quantized(graph, chosen, reduce_range=job.options.reduce_range)
    file = save_form(model, job.folder)
    method = (
        f"int8, {job.options.calibration} ranges of {len(job.calibration)} texts, "
        f"{weights_note(job.options.reduce_range)}, {len(kept)} of {len(layers)} layers in float"
    )
    return Made(file, (file,), ("onnxruntime",), method, inspect_onnx.sparsity(model), notes)


class _Search:
    """Finds the fewest layers to keep in float."""

    def __init__(
        self, graph: ModelProto, layers: Sequence[Layer], ranges: Mapping[str, Range], job: Job
    ) -> None:
        self._graph = graph
        self._layers = layers
        self._ranges = ranges
        self._job = job
        self._expected = self._answers(graph, job.trial)

    def run(self) -> tuple[list[str], tuple[str, ...]]:
        """Return the layers to keep, the worst first, and what was found."""
        job, goal = self._job, self._job.options.goal(self._job.manifest)
        task = job.manifest.task
        measure = "min cosine" if by_cosine(task) else "largest difference of a probability"
        names = [layer.name for layer in self._layers]
        job.say(f"trying all {len(names)} layers in int8")
        start = self._difference(names)
        if start <= goal:
            said = f"{measure} {as_figure(task, start):.4f} on {len(job.trial)} texts"
            return [], (f"No layer had to stay in float: {said}.",)
        effects = {}
        for at, name in enumerate(names, start=1):
            job.say(f"layer {at} of {len(names)} alone in int8")
            effects[name] = self._difference([name], _EFFECT_STEP)
        worst = sorted(names, key=lambda name: effects[name], reverse=True)
        most = int(job.options.max_float_share * len(names))
        best, best_count = start, 0
        for count in range(1, most + 1):
            job.say(f"{count} of {len(names)} layers in float")
            difference = self._difference([name for name in names if name not in worst[:count]])
            if difference < best:
                best, best_count = difference, count
            if best <= goal:
                break
        kept = worst[:best_count]
        listed = ", ".join(f"{name} ({as_figure(task, effects[name]):.4f})" for name in kept[:_NAMED])
        listed += f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
        note = (
            f"{len(kept)} of {len(names)} layers stay in float, which brings the {measure} on "
            f"{len(job.trial)} texts from {as_figure(task, start):.4f} to {as_figure(task, best):.4f}"
            + (f"; alone in int8 they gave: {listed}." if kept else ".")
        )
        if best <= goal:
            return kept, (note,)
        wanted = f"The goal of {as_figure(task, goal):g}"
        missed = f"{wanted} was not reached with up to {most} layers in float: raise --max-float."
        return kept, (note, missed)

    def _difference(self, names: Sequence[str], step: int = 1) -> float:
        """Return that of the worst text where these layers are in int8."""
        chosen = {name: self._ranges[name] for name in names}
        model = quantized(self._graph, chosen, reduce_range=self._job.options.reduce_range)
        found = self._answers(model, self._job.trial[::step])
        return max(self._job.answers.differences(found, self._expected[::step]))

    def _answers(self, model: ModelProto, items: Sequence[Encoded]) -> list[Answer]:
        """Return the answers to ``items``, each run alone and without padding."""
        probe, answers = _probe(model, self._job), self._job.answers
        names = [tensor.name for tensor in answers.manifest.outputs]
        found = []
        for item in items:
            outputs = probe.run(answers.task.assemble([item], (1, item.length)), names)
            found += answers.read(outputs, [item])
        return found


def _probe(model: ModelProto, job: Job) -> Probe:
    """Load a graph by way of a file, which may be larger than what a buffer may hold."""
    folder = job.folder / "trial"
    folder.mkdir()
    try:
        save_model(model, folder / "trial.onnx")
        return Probe(folder / "trial.onnx", job.manifest.inputs, job.threads)
    finally:
        shutil.rmtree(folder)


def _ranges(graph: ModelProto, sources: Sequence[str], job: Job) -> dict[str, Range]:
    """Return the range of each activation over the calibration texts, each run alone."""
    batches = job.batches()
    if job.options.calibration == "min-max":
        found = activation_ranges(job.model_dir / job.manifest.file, sources, batches, threads=job.threads)
        return {name: Range(*values) for name, values in found.items()}
    model = ModelProto()
    model.CopyFrom(graph)
    known = {value.name for value in (*graph.graph.output, *graph.graph.input)}
    model.graph.output.extend(ValueInfoProto(name=name) for name in sources if name not in known)
    probe = _probe(model, job)
    # Either a share of the values, or the range with the least relative entropy.
    collector = HistogramCollector(
        method=job.options.calibration,
        symmetric=False,
        num_bins=_BINS,
        num_quantized_bins=_QUANTIZED_BINS,
        percentile=PERCENTILE,
        scenario="same",
    )
    with quiet():
        for batch in batches:
            collector.collect({name: [array] for name, array in probe.run(batch, sources).items()})
        histograms = collector.compute_collection_result()
    return {name: Range(float(low), float(high)) for name, (low, high, *_) in histograms.items()}
