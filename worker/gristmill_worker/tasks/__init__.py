"""Tasks: one file each. A task encodes requests to arrays and decodes outputs to JSON values."""
