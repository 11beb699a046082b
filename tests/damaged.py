"""Forms of a model that answer wrongly, each in a way of its own; what a check has to find."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.manifest import Form, digest_files

Damage = Callable[[ModelProto], None]


def copy_with_forms(
    model: Path,
    folder: Path,
    damages: Mapping[str, Damage],
    engines: tuple[str, ...] = ("onnxruntime",),
    precision: str = "int8",
) -> Path:
    """Return a copy of the model directory with a form for each of ``damages``."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("check-*", "selftest-*", "costs-*"))
    manifest = manifests.load(folder)
    forms = {}
    for name, damage in damages.items():
        graph = onnx.load(folder / manifest.file)
        damage(graph)
        onnx.save(graph, folder / f"{name}.onnx")
        files = digest_files(folder, [f"{name}.onnx"])
        forms[name] = Form(
            file=f"{name}.onnx", precision=precision, engines=engines, method="a test", files=files
        )
    manifest.model_copy(update={"forms": forms}).write(folder)
    return folder


def nothing(model: ModelProto) -> None:
    """Leave the graph as it is."""


def other_weights(model: ModelProto) -> None:
    """Add noise to every matrix, half as large as its numbers."""
    random = np.random.default_rng(1)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim == 2 and values.dtype == np.float32:
            noisy = values + 0.5 * values.std() * random.standard_normal(values.shape)
            tensor.CopyFrom(numpy_helper.from_array(noisy.astype(np.float32), tensor.name))


def mixing_batch_mates(model: ModelProto) -> None:
    """Answer halfway to the mean over the batch: a text alone is answered rightly."""
    output = _rename_output(model)
    _add(model, "ReduceMean", ["clean"], "mates", axes=[0], keepdims=1)
    _add(model, "Sub", ["mates", "clean"], "towards")
    _add(model, "Mul", ["towards", _constant(model, np.float32(0.5))], "half")
    _add(model, "Add", ["clean", "half"], output)


def reading_padding(model: ModelProto) -> None:
    """Attend to the padding as to the text."""
    for node in model.graph.node:
        node.input[:] = ["attend_all" if name == "attention_mask" else name for name in node.input]
    _add(model, "Mul", ["attention_mask", _constant(model, np.int64(0))], "attend_none", first=True)
    _add(model, "Add", ["attend_none", _constant(model, np.int64(1))], "attend_all", at=1)


def wrong_at(length: int) -> Damage:
    """Return a damage that turns the signs of some numbers, in batches of one sequence length alone."""

    def damage(model: ModelProto) -> None:
        output = _rename_output(model)
        width = _width(model, output)
        signs = np.where(np.arange(width) % 3 == 0, -1.0, 1.0).astype(np.float32)
        _add(model, "Shape", ["input_ids"], "sizes")
        _add(model, "Gather", ["sizes", _constant(model, np.int64(1))], "length", axis=0)
        _add(model, "Equal", ["length", _constant(model, np.int64(length))], "is_wrong")
        _add(model, "Mul", ["clean", _constant(model, signs)], "turned")
        _add(model, "Where", ["is_wrong", "turned", "clean"], output)

    return damage


def answering_nan(model: ModelProto) -> None:
    """Answer NaN."""
    output = _rename_output(model)
    _add(model, "Mul", ["clean", _constant(model, np.float32("nan"))], output)


def answering_by_chance(model: ModelProto) -> None:
    """Add a little noise that is another one every time."""
    output = _rename_output(model)
    _add(model, "RandomNormalLike", ["clean"], "noise", mean=0.0, scale=1e-5, dtype=TensorProto.FLOAT)
    _add(model, "Add", ["clean", "noise"], output)


def other_labels(model: ModelProto) -> None:
    """Give every label the score of its neighbour."""
    output = _rename_output(model)
    width = _width(model, output)
    _add(model, "Gather", ["clean", _constant(model, np.roll(np.arange(width), 1))], output, axis=-1)


def _rename_output(model: ModelProto) -> str:
    """Call the first output "clean" wherever it is made and used; return its name, which is free then."""
    name: str = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["clean" if made == name else made for made in node.output]
        node.input[:] = ["clean" if used == name else used for used in node.input]
    return name


def _width(model: ModelProto, output: str) -> int:
    (value,) = (value for value in model.graph.output if value.name == output)
    return int(value.type.tensor_type.shape.dim[-1].dim_value)


def _constant(model: ModelProto, value: object) -> str:
    name = f"damage_{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return name


def _add(
    model: ModelProto,
    kind: str,
    inputs: list[str],
    output: str,
    *,
    first: bool = False,
    at: int = 0,
    **more: Any,
) -> None:
    node = helper.make_node(kind, inputs, [output], name=f"damage/{output}", **more)
    if first or at:
        model.graph.node.insert(at, node)
    else:
        model.graph.node.append(node)
