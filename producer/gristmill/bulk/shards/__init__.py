"""Runs on many machines: shards of a run as RQ jobs, and one job that makes the output of all."""
