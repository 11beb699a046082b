"""A queue of RQ jobs, served in batches."""
