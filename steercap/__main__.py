"""Entry point of `python -m steercap` and of the command `steercap`."""

import sys

from steercap.errors import MissingExtra


def main() -> None:
    """Run the command `steercap` on this process's arguments; exit with a message if an extra is not installed."""
    try:
        from steercap.cli import main as command
    except MissingExtra as error:
        sys.exit(f"steercap: {error}")
    command()


if __name__ == "__main__":
    main()
