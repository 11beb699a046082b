"""Task ``tensors``: named arrays in, named arrays out, for models that do not take text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gristmill.errors import ErrorCode
from gristmill.wire import json_type
from gristmill_worker.engines.base import Array, Shape, concrete
from gristmill_worker.models.manifest import Manifest, Tensor
from gristmill_worker.tasks.base import Encoded, ItemError, Task, read_options
from gristmill_worker.tasks.values import ENCODINGS, from_value, invalid_output, to_value

OPTION_CHECKS: Final = {"encoding": lambda value: value in ENCODINGS}


class Tensors:
    """See :class:`~gristmill_worker.tasks.base.Task`; a value is {output name: array}.

    A request gives every input without the batch dimension. Sizes along "sequence" agree within a request and
    are its length; they are padded with zeros and the outputs cut back.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def encode(self, bodies: Sequence[Mapping[str, Any]]) -> list[Encoded | ItemError]:
        items: list[Encoded | ItemError] = []
        for body in bodies:
            try:
                items.append(self._encode(body))
            except ItemError as error:
                items.append(error)
        return items

    def assemble(self, items: Sequence[Encoded], shape: Shape) -> dict[str, Array]:
        rows = [*items, *[items[0]] * (shape[0] - len(items))]
        inputs = {}
        for tensor in self._manifest.inputs:
            batch = np.zeros(concrete(tensor, shape), dtype=tensor.dtype)
            for i, item in enumerate(rows):
                array = item.arrays[tensor.name]
                place: tuple[Any, ...] = (i, *(slice(size) for size in array.shape))
                batch[place] = array
            inputs[tensor.name] = batch
        return inputs

    def decode(self, outputs: Mapping[str, Array], items: Sequence[Encoded]) -> list[Any]:
        return [self._value(outputs, i, item) for i, item in enumerate(items)]

    def arrays(self, outputs: Mapping[str, Array], i: int, item: Encoded) -> dict[str, Array]:
        """Return row ``i`` of every output without the padding of ``item``."""
        return {
            tensor.name: np.asarray(outputs[tensor.name][i])[_unpadded(tensor, item.length)]
            for tensor in self._manifest.outputs
        }

    def _value(self, outputs: Mapping[str, Array], i: int, item: Encoded) -> dict[str, Any] | ItemError:
        rows = self.arrays(outputs, i, item)
        if not all(np.isfinite(row).all() for row in rows.values()):
            return invalid_output()
        return {name: to_value(row, item.options.get("encoding", "json")) for name, row in rows.items()}

    def _encode(self, body: Mapping[str, Any]) -> Encoded:
        options = read_options(body, OPTION_CHECKS)
        given = body.get("tensors")
        if not isinstance(given, dict):
            raise ItemError(f"'tensors' is {json_type(given)}, it has to be an object")
        expected = {tensor.name for tensor in self._manifest.inputs}
        if set(given) != expected:
            raise ItemError(
                f"the model takes the tensors {', '.join(sorted(expected))}, "
                f"the request has {', '.join(sorted(given)) or 'none'}"
            )
        arrays = {t.name: from_value(given[t.name], t.name, t.dtype) for t in self._manifest.inputs}
        lengths = {
            size
            for tensor in self._manifest.inputs
            for size, dim in zip(_checked_shape(arrays[tensor.name], tensor), tensor.shape[1:], strict=True)
            if dim == "sequence"
        }
        if len(lengths) > 1:
            raise ItemError(f"the tensors' sequence sizes differ: {sorted(lengths)}")
        length = lengths.pop() if lengths else 1
        if length == 0:
            raise ItemError("the tensors are empty", ErrorCode.EMPTY_INPUT)
        if length > self._manifest.max_length:
            raise ItemError(
                f"the sequence has {length} steps, the model takes {self._manifest.max_length}",
                ErrorCode.TOO_LONG,
            )
        return Encoded(length, arrays, options)


def _checked_shape(array: Array, tensor: Tensor) -> tuple[int, ...]:
    expected = tensor.shape[1:]
    fits = len(array.shape) == len(expected) and all(
        dim in {"sequence", size} for size, dim in zip(array.shape, expected, strict=False)
    )
    if not fits:
        raise ItemError(f"tensor {tensor.name!r} has shape {list(array.shape)}, not {list(expected)}")
    return array.shape


def _unpadded(tensor: Tensor, length: int) -> tuple[slice, ...]:
    return tuple(slice(length if dim == "sequence" else None) for dim in tensor.shape[1:])


def make(model_dir: Path, manifest: Manifest, *, truncate: bool) -> Task:  # noqa: ARG001 - same for all tasks
    """Return the task for one model directory."""
    return Tensors(manifest)
