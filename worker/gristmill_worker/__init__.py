"""Gristmill's worker: drains a Redis queue, runs fixed-shape batches on a CPU, writes results back."""

import os
import sys

# onnxruntime's builds send usage data to Microsoft unless told otherwise, before they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# OpenVINO writes an identifier into the home directory and reports its use when it is imported, unless the
# package that does so cannot be.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
