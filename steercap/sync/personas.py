"""From a trait to its vector, without `await`: the functions of `steercap.lab.personas` that take an open model."""

from steercap.lab.personas import pipeline as _there
from steercap.sync.twins import blocking

__all__ = ["run"]

run = blocking(_there.run)


def __dir__() -> list[str]:
    """The functions, and no more."""
    return [*__all__, "__doc__", "__file__", "__name__"]
