"""Evaluation of steering methods without `await`: twins of functions in `steercap.lab.studies.evaluation`."""

from steercap.lab.studies.evaluation import methods as _methods
from steercap.lab.studies.evaluation import running as _running
from steercap.sync.twins import blocking

__all__ = ["evaluate", "shuffled"]

evaluate = blocking(_running.evaluate)
shuffled = blocking(_methods.shuffled)


def __dir__() -> list[str]:
    """Return the names of the functions."""
    return [*__all__, "__doc__", "__file__", "__name__"]
