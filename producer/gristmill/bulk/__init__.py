"""Offline scoring of files: inputs, readers, outputs with checkpoints, the run itself and its display."""

from gristmill.bulk.job import Job
from gristmill.bulk.score import score_file
from gristmill.bulk.summary import Summary

__all__ = ["Job", "Summary", "score_file"]
