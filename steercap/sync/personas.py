"""Persona vectors without `await`: twins of functions in `steercap.lab.personas`."""

from steercap.lab.personas import pipeline as _there
from steercap.sync.twins import blocking

__all__ = ["run"]

run = blocking(_there.run)


def __dir__() -> list[str]:
    """Return the names of the functions."""
    return [*__all__, "__doc__", "__file__", "__name__"]
