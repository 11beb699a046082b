"""Tiny Hugging Face-style checkpoints with random weights, the same on every machine, and their tokenizer.

Needs numpy and tokenizers only: golden numbers are made from the same folders with other libraries installed.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

Weights = dict[str, NDArray[np.float32]]

_WORDS: Final = """
the a of and to in is was it for on with as by at from this that not but be are we you they he she
mill wheel stone flour grain water river bread miller corn barley oats sack door road horse cart
night day morning rain sun wind old new small large good bad warm cold fast slow never always often
turns grinds brings takes carries opens closes waits works stops starts rises falls breaks holds
sells buys
"""
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'-()"
BERT_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIAL: Final = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")

_ARCHITECTURES: Final = {
    "bert": "Bert",
    "distilbert": "DistilBert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
}
_PREFIXES: Final = {
    "bert": "bert.",
    "distilbert": "distilbert.",
    "roberta": "roberta.",
    "xlm-roberta": "roberta.",
}


def is_roberta(family: str) -> bool:
    return family in {"roberta", "xlm-roberta"}


def vocabulary(family: str = "bert") -> dict[str, int]:
    """Return the fixed vocabulary: special tokens, words, and characters so that little is unknown."""
    special = ROBERTA_SPECIAL if is_roberta(family) else BERT_SPECIAL
    tokens = [*special, *_WORDS.split(), *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def write_checkpoint(
    directory: Path,
    family: str = "bert",
    head: Sequence[str] | None = None,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    inner: int = 64,
    max_length: int = 48,
    seed: int = 7,
    prefix: bool = True,
    dtype: str = "F32",
    shards: int = 1,
    old_norm_names: bool = False,
    drop: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder and return it.

    ``family`` is bert, distilbert, roberta or xlm-roberta; ``head`` the labels of a sequence classifier, or
    None for an encoder. ``max_length`` is in tokens; ``dtype`` one of F32, F16, BF16. ``old_norm_names`` uses
    gamma and beta; ``drop`` leaves out the weight of that name; ``config`` overrides settings. The weights
    depend on ``seed``, the sizes, the family and the head, and on nothing else.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = _encoder_weights(family, hidden, layers, inner, max_length, seed)
    if prefix and head is not None:
        weights = {_PREFIXES[family] + name: array for name, array in weights.items()}
    if head is not None:
        weights |= _head_weights(family, hidden, len(head), seed)
    if old_norm_names:
        weights = {_old_name(name): array for name, array in weights.items()}
    if drop is not None:
        del weights[drop]
    settings = _config(family, head, hidden, layers, heads, inner, max_length) | dict(config or {})
    (directory / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    _write_weights(directory, weights, dtype, shards)
    write_tokenizer(directory, family)
    return directory


def write_tokenizer(directory: Path, family: str = "bert") -> Path:
    """Write ``tokenizer.json`` (WordPiece, lower case, pairs) and return its path."""
    ids = vocabulary(family)
    if is_roberta(family):
        start, end, unknown = "<s>", "</s>", "<unk>"
        single, pair = "<s> $A </s>", "<s> $A </s> </s> $B </s>"
    else:
        start, end, unknown = "[CLS]", "[SEP]", "[UNK]"
        single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(ROBERTA_SPECIAL if is_roberta(family) else BERT_SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(start, ids[start]), (end, ids[end])]
    )
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return path


class _Random:
    """Uniform numbers from the raw stream of PCG64, which numpy promises never to change."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def __call__(self, *shape: int, scale: float = 0.25, around: float = 0.0) -> NDArray[np.float32]:
        raw = self._bits.random_raw(int(np.prod(shape)))
        unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return (around + scale * (2.0 * unit - 1.0)).astype(np.float32).reshape(shape)


def _encoder_weights(
    family: str, hidden: int, layers: int, inner: int, max_length: int, seed: int
) -> Weights:
    random = _Random(seed)
    weights: Weights = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        weights[f"{name}.weight"] = random(outputs, inputs)
        weights[f"{name}.bias"] = random(outputs)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = random(hidden, around=1.0)
        weights[f"{name}.bias"] = random(hidden)

    positions = max_length + 2 if is_roberta(family) else max_length
    tables = {"word": len(vocabulary(family)), "position": positions, "token_type": 2}
    if family == "distilbert":
        del tables["token_type"]
    for name, rows in tables.items():
        weights[f"embeddings.{name}_embeddings.weight"] = random(rows, hidden, scale=1.0)
    norm("embeddings.LayerNorm")
    for index in range(layers):
        if family == "distilbert":
            layer = f"transformer.layer.{index}"
            for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
                linear(f"{layer}.attention.{part}", hidden, hidden)
            names = ("sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm")
        else:
            layer = f"encoder.layer.{index}"
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                linear(f"{layer}.attention.{part}", hidden, hidden)
            names = ("attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm")
        norm(f"{layer}.{names[0]}")
        linear(f"{layer}.{names[1]}", inner, hidden)
        linear(f"{layer}.{names[2]}", hidden, inner)
        norm(f"{layer}.{names[3]}")
    if family == "bert":
        linear("pooler.dense", hidden, hidden)
    return weights


def _head_weights(family: str, hidden: int, labels: int, seed: int) -> Weights:
    random = _Random(seed + 1)
    names = {"bert": ("classifier",), "distilbert": ("pre_classifier", "classifier")}.get(
        family, ("classifier.dense", "classifier.out_proj")
    )
    weights: Weights = {}
    for name in names:
        outputs = labels if name == names[-1] else hidden
        weights[f"{name}.weight"] = random(outputs, hidden)
        weights[f"{name}.bias"] = random(outputs)
    return weights


def _config(
    family: str, head: Sequence[str] | None, hidden: int, layers: int, heads: int, inner: int, max_length: int
) -> dict[str, Any]:
    kind = "ForSequenceClassification" if head is not None else "Model"
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family] + kind],
        "model_type": family,
        "vocab_size": len(vocabulary(family)),
        "max_position_embeddings": max_length + 2 if is_roberta(family) else max_length,
        "pad_token_id": 1 if is_roberta(family) else 0,
    }
    if family == "distilbert":
        config |= {
            "dim": hidden,
            "n_layers": layers,
            "n_heads": heads,
            "hidden_dim": inner,
            "activation": "gelu",
        }
    else:
        config |= {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": inner,
            "hidden_act": "gelu",
            # Large enough that a graph which ignores it differs visibly.
            "layer_norm_eps": 1e-3,
            "type_vocab_size": 2,
        }
    if head is not None:
        config["id2label"] = {str(index): label for index, label in enumerate(head)}
        config["label2id"] = {label: index for index, label in enumerate(head)}
    return config


def _old_name(name: str) -> str:
    return re.sub(
        r"LayerNorm\.bias$", "LayerNorm.beta", re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name)
    )


def _write_weights(directory: Path, weights: Weights, dtype: str, shards: int) -> None:
    if shards == 1:
        write_safetensors(directory / "model.safetensors", weights, dtype)
        return
    table: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in list(weights)[shard::shards]}
        write_safetensors(directory / file, part, dtype)
        table |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": table}), encoding="utf-8"
    )


def write_safetensors(path: Path, weights: Weights, dtype: str = "F32") -> None:
    """Write the format directly: the length of the header, the header as JSON, then the arrays."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name, array in weights.items():
        if dtype == "BF16":
            blob = (array.view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            blob = array.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
