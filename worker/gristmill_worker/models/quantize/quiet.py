"""Libraries that print, draw progress bars or report home are kept from it here."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

_TELEMETRY = "openvino_telemetry"


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what the block prints and warns; the caller says what matters."""
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def no_telemetry() -> Iterator[None]:
    """Import OpenVINO and NNCF within this block: they look for a package that reports home, and go without.

    Switches come too late: the mere import of OpenVINO writes an identifier into the home directory.
    """
    before = sys.modules.get(_TELEMETRY)
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment] # an import of it fails
    try:
        yield
    finally:
        if before is None:
            del sys.modules[_TELEMETRY]
        else:
            sys.modules[_TELEMETRY] = before
