"""``python -m gristmill_worker`` is ``gristmill-worker``."""

from gristmill_worker.cli import main

main()
