"""Gristmill's worker: drains a Redis queue, runs fixed-shape batches on a CPU, writes results back."""

import os

# onnxruntime's builds send usage data to Microsoft unless told otherwise, before they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
