"""Gristmill's worker: drains a Redis queue, runs fixed-shape batches on a CPU, writes results back."""
