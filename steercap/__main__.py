"""`steercap`, or `python -m steercap`: the command."""

import sys

from steercap.errors import MissingExtra


def main() -> None:
    """Entry point of the command `steercap`."""
    try:
        from steercap.cli import main as command
    except MissingExtra as error:
        sys.exit(f"steercap: {error}")
    command()


if __name__ == "__main__":
    main()
