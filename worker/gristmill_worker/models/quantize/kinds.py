"""The table of quantized forms that can be made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from gristmill.errors import InputFileError
from gristmill_worker.models.quantize.job import Make

# kind -> module and function
KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "int8-rows": ("gristmill_worker.models.quantize.ort_dynamic", "make_rows"),
    "int8-openvino": ("gristmill_worker.models.quantize.openvino_nncf", "make"),
    "int8-deepsparse": ("gristmill_worker.models.quantize.deepsparse", "make"),
    "int8-ort": ("gristmill_worker.models.quantize.ort_static", "make"),
    "int8-ort-dynamic": ("gristmill_worker.models.quantize.ort_dynamic", "make_batch"),
}


def find_kind(kind: str) -> Make:
    """Return what makes forms of ``kind``; raise :class:`InputFileError` for one that is unknown."""
    if kind not in KINDS:
        raise InputFileError(f"form {kind!r} is unknown: use one of {', '.join(KINDS)}")
    module, function = KINDS[kind]
    make: Make = getattr(import_module(module), function)
    return make
