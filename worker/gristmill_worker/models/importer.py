"""``model import``: from whatever a model comes as to a model directory that workers can trust."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.errors import InputFileError
from gristmill_worker.models import bert_onnx, inspect_onnx
from gristmill_worker.models.checkpoint import has_weights, read_checkpoint
from gristmill_worker.models.graph_builder import save_model
from gristmill_worker.models.inspect_onnx import Probe
from gristmill_worker.models.manifest import (
    FILE_NAME,
    MODEL_FILE,
    TOKENIZER_FILE,
    Manifest,
    ModelRefusedError,
    Tensor,
    digest_files,
    load,
)
from gristmill_worker.models.origin import Origin, find_origin
from gristmill_worker.models.publish import staged
from gristmill_worker.models.text_settings import (
    find_labels,
    find_max_length,
    find_pad_token_id,
    find_pooling,
    largest_token_id,
    read_optional,
    read_tokenizer,
    write_tokenizer,
)

CONFIG_FILE = "config.json"
_TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})


def import_model(src: str, out: Path, *, force: bool = False) -> Manifest:
    """Make the model directory ``out`` from ``src`` and return its manifest.

    ``src`` is a folder with ``model.onnx`` or with a Hugging Face checkpoint in safetensors, an installed
    package that carries one (``pkg:NAME``), or a model of the hub (``hf:org/name``). ``out`` appears when the
    graph has loaded, run and answered finite numbers of the shape that the manifest says; otherwise nothing
    is left behind. An encoder that does not say how it pools gets mean pooling and normalisation.

    Raises :class:`InputFileError` for a source that is not there and, without ``force``, for an ``out`` that
    exists; :class:`ModelRefusedError` for a model that is not supported, is incomplete or does not run.
    """
    origin = find_origin(src)
    with staged(out, force=force) as folder:
        if (origin.folder / FILE_NAME).is_file():
            return _copy(origin.folder, folder)
        config = read_optional(origin.folder / CONFIG_FILE)
        files = _write_model(origin, folder)
        has_tokenizer = write_tokenizer(origin.folder, folder, config)
        files += [TOKENIZER_FILE] if has_tokenizer else []
        for path in (origin.folder / CONFIG_FILE, origin.licence_file):
            if path is not None and path.is_file():
                shutil.copyfile(path, folder / path.name)
                files.append(path.name)
        manifest = _describe(origin, folder, config, files)
        manifest.write(folder)
    return manifest


def _copy(source: Path, folder: Path) -> Manifest:
    """Copy what is a model directory already, and verify the copy."""
    manifest = load(source)
    for form in manifest.damaged:
        manifest.select(form)  # says what is wrong
    for name in (*manifest.all_files, FILE_NAME):
        shutil.copyfile(source / name, folder / name)
    return load(folder)


def _write_model(origin: Origin, folder: Path) -> list[str]:
    """Copy or build the graph; return the names of its files."""
    source = origin.folder
    if (source / MODEL_FILE).is_file():
        names = [MODEL_FILE, *inspect_onnx.external_files(source / MODEL_FILE)]
        for name in names:
            shutil.copyfile(source / name, folder / name)
        return names
    if (source / CONFIG_FILE).is_file() and has_weights(source):
        return save_model(bert_onnx.build(read_checkpoint(source)), folder / MODEL_FILE)
    if (source / "pytorch_model.bin").is_file():
        raise InputFileError(
            f"{source} has its weights in pytorch_model.bin only. Such files can run code and are not read: "
            "save the model with transformers' save_pretrained(..., safe_serialization=True)"
        )
    raise InputFileError(f"{source} has no {MODEL_FILE}, and no {CONFIG_FILE} with model.safetensors")


def _describe(origin: Origin, folder: Path, config: Mapping[str, Any], files: list[str]) -> Manifest:
    """Load and try the graph, and return the manifest of what it is."""
    graph = inspect_onnx.read_graph(folder / MODEL_FILE)
    inputs = inspect_onnx.graph_inputs(graph)
    probe = Probe(folder / MODEL_FILE, inputs)
    outputs = probe.outputs()
    tokenizer = read_tokenizer(folder) if TOKENIZER_FILE in files else None
    if origin.folder.joinpath(MODEL_FILE).is_file():
        pad_token_id = find_pad_token_id(config, tokenizer)
    else:
        pad_token_id = bert_onnx.pad_token_id(config)
    max_length = find_max_length(origin.folder, config, pad_token_id)
    sequential = any("sequence" in tensor.shape for tensor in inputs)
    if tokenizer is not None:
        use = _text_use(origin.folder, config, inputs, outputs)
        probe.run_longest(max_length, largest_token_id(tokenizer))
    else:
        use = {"task": "tensors", "outputs": outputs}
        max_length = max_length if sequential else 1
        probe.run_longest(max_length)
    precision = inspect_onnx.precision(graph)
    if precision == "fp32":  # rounding of quantized graphs differs from batch to batch
        probe.check_padding(use["outputs"], max_length, pad_token_id)
    return Manifest(
        name=origin.name,
        precision=precision,
        sparsity=inspect_onnx.sparsity(graph),
        inputs=inputs,
        max_length=max_length,
        pad_token_id=pad_token_id,
        source=origin.source,
        licence=origin.licence,
        files=digest_files(folder, files),
        **use,
    )


def _text_use(
    source: Path, config: Mapping[str, Any], inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> dict[str, Any]:
    """Return the manifest's task, its settings, and the one output that it uses."""
    names = {tensor.name for tensor in inputs}
    if "input_ids" not in names or not names <= _TEXT_INPUTS:
        raise ModelRefusedError(
            f"the model comes with {TOKENIZER_FILE} but takes {', '.join(sorted(names))}, not input_ids with "
            f"attention_mask and token_type_ids: without {TOKENIZER_FILE} it is imported for raw tensors"
        )
    if fixed := [tensor.name for tensor in inputs if tensor.shape != ("batch", "sequence")]:
        raise ModelRefusedError(
            f"input {fixed[0]!r} has a fixed length: export it with (batch, sequence) free"
        )
    for output in outputs:
        if output.name == "logits" and len(output.shape) == 2 and isinstance(output.shape[1], int):
            labels = find_labels(config, output.shape[1])
            return {
                "task": "text-classification",
                "outputs": (output,),
                "labels": labels.names,
                "activation": labels.activation,
            }
    states = [output for output in outputs if len(output.shape) == 3 and output.shape[1] == "sequence"]
    states = [output for output in states if output.name == "last_hidden_state"] or states
    # Some exports pool inside the graph and leave nothing but this.
    states = states or [output for output in outputs if output.name == "sentence_embedding"]
    if len(states) == 1 and states[0].name != "logits":
        pooling, normalize = find_pooling(source)
        return {"task": "embeddings", "outputs": (states[0],), "pooling": pooling, "normalize": normalize}
    listed = ", ".join(f"{output.name} {list(output.shape)}" for output in outputs)
    raise ModelRefusedError(
        f"the model's outputs ({listed}) are neither logits (batch, labels) nor token states (batch, "
        f"sequence, hidden): without {TOKENIZER_FILE} it is imported for raw tensors"
    )
