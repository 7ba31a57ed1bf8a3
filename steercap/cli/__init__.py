"""The command `steercap`: thin commands over functions that take an open model."""


def main() -> None:
    """Entry point of the command `steercap`."""
    from steercap.cli.app import app

    app(prog_name="steercap")
