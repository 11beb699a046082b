"""``gristmill-worker tune``: measure a model on this CPU and choose how to run it."""
