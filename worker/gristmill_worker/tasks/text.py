"""Tokenization and padding, shared by all tasks that score text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Encoding, Tokenizer

from gristmill.errors import ErrorCode
from gristmill.wire import json_type
from gristmill_worker.engines.base import Array, Shape
from gristmill_worker.models.manifest import TOKENIZER_FILE, Manifest, ModelRefusedError
from gristmill_worker.tasks.base import Encoded, ItemError, read_options

CHARS_PER_TOKEN: Final = 8  # more than texts have: one look is enough for nearly all
SPARE_TOKENS: Final = 16
OPTION_CHECKS: Final = {"truncate": lambda value: isinstance(value, bool)}


class TextEncoder:
    """Turns request bodies into token arrays and these into padded batches."""

    def __init__(
        self, model_dir: Path, manifest: Manifest, checks: Mapping[str, Any], *, truncate: bool
    ) -> None:
        """``checks`` are the task's own options (see :func:`~gristmill_worker.tasks.base.read_options`)."""
        self._checks = {**OPTION_CHECKS, **checks}
        try:
            self._tokenizer = Tokenizer.from_file(str(model_dir / TOKENIZER_FILE))
        except Exception as error:  # the library raises plain Exception
            raise ModelRefusedError(f"{model_dir / TOKENIZER_FILE} cannot be read: {error}") from error
        # Files often ship with padding and a shorter truncation switched on.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._counter = Tokenizer.from_str(self._tokenizer.to_str())
        self._tokenizer.enable_truncation(manifest.max_length)
        self._manifest = manifest
        self._truncate = truncate

    def encode(self, bodies: Sequence[Mapping[str, Any]]) -> list[Encoded | ItemError]:
        """Encode a window; see :meth:`~gristmill_worker.tasks.base.Task.encode`."""
        read: list[Mapping[str, Any] | ItemError] = []  # options
        texts: list[str | tuple[str, str]] = []
        for body in bodies:
            try:
                options = read_options(body, self._checks)
                text = self._shorten(_part(body, "text"))
                has_pair = body.get("pair") is not None
                texts.append((text, self._shorten(_part(body, "pair"))) if has_pair else text)
            except ItemError as error:
                read.append(error)
            else:
                read.append(options)
        encodings = iter(self._tokenizer.encode_batch_fast(texts))
        return [each if isinstance(each, ItemError) else self._item(next(encodings), each) for each in read]

    def assemble(self, items: Sequence[Encoded], shape: Shape) -> dict[str, Array]:
        """Pad to ``shape``; spare rows repeat the first item, so that every row is a sensible one."""
        rows = [*items, *[items[0]] * (shape[0] - len(items))]
        inputs = {}
        for tensor in self._manifest.inputs:
            fill = self._manifest.pad_token_id if tensor.name == "input_ids" else 0
            array = np.full(shape, fill, dtype=tensor.dtype)  # (batch, sequence)
            for row, item in zip(array, rows, strict=True):
                if tensor.name == "attention_mask":
                    row[: item.length] = 1
                elif (values := item.arrays.get(tensor.name)) is not None:
                    row[: item.length] = values
            inputs[tensor.name] = array
        return inputs

    def _shorten(self, text: str) -> str:
        """Return a part of a long text that is certain to have more tokens than the model takes.

        The tokenizer's work grows with a text, for a pair with the product of both, while all but the first
        tokens are cut. The part ends at a space, or has tokens to spare behind the last one that is kept.
        """
        chars = self._manifest.max_length * CHARS_PER_TOKEN
        while len(text) > chars:
            part = text[:chars]
            space = part.rfind(" ")
            part = part[:space] if space > chars // 2 else part
            if len(self._counter.encode_batch_fast([part])[0]) >= self._manifest.max_length + SPARE_TOKENS:
                return part
            chars *= 2
        return text

    def _item(self, encoding: Encoding, options: Mapping[str, Any]) -> Encoded | ItemError:
        truncated = bool(encoding.overflowing)
        if truncated and not options.get("truncate", self._truncate):
            return ItemError(
                f"the text has more than the {self._manifest.max_length} tokens that the model takes: "
                "shorten it, or allow truncation with the option 'truncate'",
                ErrorCode.TOO_LONG,
            )
        ids = encoding.ids
        arrays: dict[str, Any] = {"input_ids": np.array(ids, dtype=np.int64)}  # (length,)
        if encoding.n_sequences > 1:
            arrays["token_type_ids"] = np.array(encoding.type_ids, dtype=np.int64)  # (length,)
        return Encoded(len(ids), arrays, options, truncated)


def attended(items: Sequence[Encoded], sequence: int) -> Array:
    """Return the attention mask of ``items`` as booleans, (items, sequence)."""
    lengths = np.array([item.length for item in items])
    return np.arange(sequence) < lengths[:, None]


def _part(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        what = f"is {json_type(value)}" if name in body else "is missing"
        raise ItemError(f"'{name}' {what}, it has to be a string")
    if not value or value.isspace():
        raise ItemError(f"'{name}' is empty", ErrorCode.EMPTY_INPUT)
    return value
