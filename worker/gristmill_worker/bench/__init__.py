"""``gristmill-worker bench``: what a worker reaches of its engine's speed, and where the rest goes."""
