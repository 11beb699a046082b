"""Offline scoring of files: readers, writers, the run itself and its display."""

from gristmill.bulk.score import Job, Summary, score_file

__all__ = ["Job", "Summary", "score_file"]
