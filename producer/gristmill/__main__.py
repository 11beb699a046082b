"""``gristmill``, also as ``python -m gristmill``."""

from gristmill import start


def main() -> None:
    """Entry point of ``gristmill``."""
    start.run("gristmill.cli")


if __name__ == "__main__":
    main()
