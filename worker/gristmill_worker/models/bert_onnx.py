"""BERT-family checkpoints as ONNX graphs, built directly from the weights, without torch.

Supported: BERT (and MiniLM), DistilBERT, RoBERTa and XLM-RoBERTa, as encoders or with a head for sequence
classification. Inputs carry the hub's names: ``input_ids``, ``attention_mask`` and, for BERT,
``token_type_ids``, all int64 (batch, sequence). The output is ``last_hidden_state`` (batch, sequence, hidden)
for an encoder and ``logits`` (batch, labels) for a classifier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from gristmill_worker.models.checkpoint import Checkpoint, Weight
from gristmill_worker.models.graph_builder import GraphBuilder, Linear, Norm
from gristmill_worker.models.manifest import ModelRefusedError
from gristmill_worker.models.text_settings import given_pad_token_id

_ACTIVATIONS: Mapping[str, Callable[[GraphBuilder, str, str], str]] = {
    "gelu": GraphBuilder.gelu,
    "gelu_new": GraphBuilder.gelu_tanh,
    "gelu_pytorch_tanh": GraphBuilder.gelu_tanh,
    "relu": GraphBuilder.relu,
}
_ENCODER_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")


@dataclass(frozen=True)
class Family:
    """Where a family keeps its sizes (config keys, and the values where a key is absent) and its weights."""

    hidden: tuple[str, int]
    layers: tuple[str, int]
    heads: tuple[str, int]
    inner: tuple[str, int]
    activation: str
    epsilon: tuple[str, float]
    layer_prefix: str
    layer_names: Mapping[str, str]
    pad_token_id: int
    token_types: bool  # has a table of them
    token_type_input: bool  # and takes them from the request
    offset_positions: bool  # positions count from pad_token_id + 1 and skip padding


_BERT_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "inner": "intermediate.dense",
    "outer": "output.dense",
    "norm": "output.LayerNorm",
}
_DISTILBERT_LAYER = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "attention_output": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "inner": "ffn.lin1",
    "outer": "ffn.lin2",
    "norm": "output_layer_norm",
}


def _bert_like(*, pad_token_id: int, roberta: bool) -> Family:
    return Family(
        hidden=("hidden_size", 768),
        layers=("num_hidden_layers", 12),
        heads=("num_attention_heads", 12),
        inner=("intermediate_size", 3072),
        activation="hidden_act",
        epsilon=("layer_norm_eps", 1e-12),
        layer_prefix="encoder.layer",
        layer_names=_BERT_LAYER,
        pad_token_id=pad_token_id,
        token_types=True,
        token_type_input=not roberta,
        offset_positions=roberta,
    )


FAMILIES: Mapping[str, Family] = {
    "bert": _bert_like(pad_token_id=0, roberta=False),
    "roberta": _bert_like(pad_token_id=1, roberta=True),
    "xlm-roberta": _bert_like(pad_token_id=1, roberta=True),
    "distilbert": Family(
        hidden=("dim", 768),
        layers=("n_layers", 6),
        heads=("n_heads", 12),
        inner=("hidden_dim", 3072),
        activation="activation",
        epsilon=("layer_norm_eps", 1e-12),  # never set: the family's code fixes it
        layer_prefix="transformer.layer",
        layer_names=_DISTILBERT_LAYER,
        pad_token_id=0,
        token_types=False,
        token_type_input=False,
        offset_positions=False,
    ),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the checkpoint's family; raise :class:`ModelRefusedError` for one that is not supported."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelRefusedError(
            f"model_type {name!r} is not supported: use one of {', '.join(sorted(FAMILIES))}, "
            "or export the model to ONNX and import the folder with its model.onnx"
        )
    return FAMILIES[name]


def pad_token_id(config: Mapping[str, Any]) -> int:
    """Return the padding token that the family's graph expects."""
    given = given_pad_token_id(config)
    return family_of(config).pad_token_id if given is None else given


def is_classifier(checkpoint: Checkpoint) -> bool:
    """Say whether a sequence-classification head belongs to the checkpoint.

    Raises :class:`ModelRefusedError` for heads of other kinds (tokens, spans, choices).
    """
    architectures = checkpoint.config.get("architectures") or []
    if not architectures:
        return "classifier.bias" in checkpoint.weights or "classifier.out_proj.bias" in checkpoint.weights
    if not str(architectures[0]).endswith(_ENCODER_SUFFIXES):
        raise ModelRefusedError(
            f"architecture {architectures[0]!r} is not supported: only encoders and sequence classifiers are"
        )
    return str(architectures[0]).endswith("ForSequenceClassification")


def build(checkpoint: Checkpoint) -> ModelProto:
    """Return the checkpoint's graph in fp32; see the module's description for inputs and outputs.

    Raises :class:`ModelRefusedError` naming a missing weight or an unsupported setting.
    """
    return _Bert(checkpoint).build()


class _Bert:
    """Puts one checkpoint's weights into a graph."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = config = checkpoint.config
        self.family = family = family_of(config)
        self.hidden = _size(config, *family.hidden)
        self.layers = _size(config, *family.layers)
        self.heads = _size(config, *family.heads)
        self.inner = _size(config, *family.inner)
        self.epsilon: float = config.get(*family.epsilon)
        self.graph = GraphBuilder()
        self._check()
        self.activation = _ACTIVATIONS[config.get(family.activation, "gelu")]

    def _check(self) -> None:
        positions = self.config.get("position_embedding_type", "absolute")
        if positions != "absolute":
            raise ModelRefusedError(
                f"position_embedding_type {positions!r} is not supported, only 'absolute'"
            )
        activation = self.config.get(self.family.activation, "gelu")
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            raise ModelRefusedError(
                f"{self.family.activation} {activation!r} is not supported, only {', '.join(_ACTIVATIONS)}"
            )
        if self.config.get("is_decoder"):
            raise ModelRefusedError(
                "the checkpoint is a decoder (is_decoder is true): only encoders are supported"
            )
        if self.hidden % self.heads:
            raise ModelRefusedError(f"a hidden size of {self.hidden} cannot be split over {self.heads} heads")

    def build(self) -> ModelProto:
        inputs = ["input_ids", "attention_mask"]
        if self.family.token_type_input:
            inputs.append("token_type_ids")
        x = self._embeddings()
        bias = self.graph.mask_bias("attention_mask")
        for index in range(self.layers):
            last = index == self.layers - 1 and not is_classifier(self.checkpoint)
            x = self._layer(x, bias, index, "last_hidden_state" if last else f"layer.{index}")
        if is_classifier(self.checkpoint):
            labels = self._head(x)
            output = _value("logits", TensorProto.FLOAT, "batch", labels)
        else:
            output = _value("last_hidden_state", TensorProto.FLOAT, "batch", "sequence", self.hidden)
        ids = [_value(name, TensorProto.INT64, "batch", "sequence") for name in inputs]
        return self.graph.model(ids, [output], str(self.config["model_type"]))

    def _embeddings(self) -> str:
        graph, family = self.graph, self.family
        words = graph.weight(self._table("word"), "embeddings.word")
        x = graph.op("Gather", [words, "input_ids"], "embeddings/words")  # (batch, sequence, hidden)
        if family.token_types:
            table = self._table("token_type")
            if family.token_type_input:
                types = graph.weight(table, "embeddings.token_type")
                types = graph.op("Gather", [types, "token_type_ids"], "embeddings/types")
            else:
                types = graph.weight(table[0], "embeddings.token_type")  # every token is of type 0
            x = graph.op("Add", [x, types], "embeddings/typed")
        x = graph.op("Add", [x, self._positions()], "embeddings/placed")
        return graph.layer_norm(x, self._norm("embeddings.LayerNorm"), "embeddings")

    def _positions(self) -> str:
        """Return the positions' embeddings: (batch, sequence, hidden), or (sequence, hidden) for all rows."""
        graph = self.graph
        table = graph.weight(self._table("position"), "embeddings.position")
        if self.family.offset_positions:
            # Real tokens count up from pad + 1, padding stays at pad, wherever it stands.
            pad = graph.constant(pad_token_id(self.config), np.int64)
            padding = graph.op("Equal", ["input_ids", pad], "positions/padding")
            real = graph.op("Not", [padding], "positions/real")
            ones = graph.op("Cast", [real], "positions/ones", to=TensorProto.INT64)
            count = graph.op("CumSum", [ones, graph.constant(1, np.int64)], "positions/count")
            counted = graph.op("Mul", [count, ones], "positions/counted")
            ids = graph.op("Add", [counted, pad], "positions/ids")  # (batch, sequence)
            return graph.op("Gather", [table, ids], "embeddings/positions")
        shape = graph.op("Shape", ["input_ids"], "positions/shape")
        length = graph.op("Slice", [shape, graph.ints(1), graph.ints(2), graph.ints(0)], "positions/length")
        return graph.op("Slice", [table, graph.ints(0), length, graph.ints(0)], "embeddings/positions")

    def _layer(self, x: str, bias: str, index: int, name: str) -> str:
        graph, prefix = self.graph, f"layer.{index}"
        full = {
            part: f"{self.family.layer_prefix}.{index}.{key}" for part, key in self.family.layer_names.items()
        }
        hidden, inner = self.hidden, self.inner
        qkv = [self._linear(full[part], hidden, hidden) for part in ("query", "key", "value")]
        context = graph.attention(x, qkv, self.heads, bias, f"{prefix}/attention")
        output = self._linear(full["attention_output"], hidden, hidden)
        attended = graph.linear(context, output, f"{prefix}/attention_output")
        attended = graph.op("Add", [attended, x], f"{prefix}/attention_residual")
        attended = graph.layer_norm(attended, self._norm(full["attention_norm"]), f"{prefix}/attention_norm")
        wide = graph.linear(attended, self._linear(full["inner"], inner, hidden), f"{prefix}/inner")
        wide = self.activation(graph, wide, f"{prefix}/activation")
        narrow = graph.linear(wide, self._linear(full["outer"], hidden, inner), f"{prefix}/outer")
        residual = graph.op("Add", [narrow, attended], f"{prefix}/residual")
        return graph.layer_norm(residual, self._norm(full["norm"]), name)

    def _head(self, x: str) -> int:
        """Add the classification head, whose output is called ``logits``; return the number of labels."""
        graph, hidden = self.graph, self.hidden
        first = graph.first_token(x, "head/first_token")
        dense, final, activation = {
            "bert": ("pooler.dense", "classifier", GraphBuilder.tanh),
            "distilbert": ("pre_classifier", "classifier", GraphBuilder.relu),
        }.get(self.config["model_type"], ("classifier.dense", "classifier.out_proj", GraphBuilder.tanh))
        pooled = graph.linear(first, self._linear(dense, hidden, hidden), "head/dense")
        pooled = activation(graph, pooled, "head/pooled")
        labels: int = self.checkpoint.any_weight(f"{final}.bias").size
        graph.linear(pooled, self._linear(final, labels, hidden), "logits")
        return labels

    def _table(self, kind: str) -> Weight:
        name = f"embeddings.{kind}_embeddings.weight"
        return self.checkpoint.weight(name, *self.checkpoint.any_weight(name).shape[:1], self.hidden)

    def _linear(self, name: str, outputs: int, inputs: int) -> Linear:
        weight = self.checkpoint.weight(f"{name}.weight", outputs, inputs)
        return Linear(weight, self.checkpoint.weight(f"{name}.bias", outputs))

    def _norm(self, name: str) -> Norm:
        weight = self.checkpoint.weight(f"{name}.weight", self.hidden)
        return Norm(weight, self.checkpoint.weight(f"{name}.bias", self.hidden), self.epsilon)


def _size(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if type(value) is not int or value < 1:
        raise ModelRefusedError(f"{name} is {value!r} in the model's configuration, not a number from 1")
    return value


def _value(name: str, kind: int, *shape: str | int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))
