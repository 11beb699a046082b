"""``gristmill-worker``, also as ``python -m gristmill_worker``."""

from gristmill import start


def main() -> None:
    """Entry point of ``gristmill-worker``."""
    start.run("gristmill_worker.cli")


if __name__ == "__main__":
    main()
