"""From texts to directions, without `await`: the functions of `steercap.vectors` that take an open model."""

from steercap.sync.twins import blocking
from steercap.vectors import calibrating as _calibrating
from steercap.vectors import extraction as _there

__all__ = ["calibrate", "extract", "mean_rows"]

calibrate = blocking(_calibrating.calibrate)
extract = blocking(_there.extract)
mean_rows = blocking(_there.mean_rows)


def __dir__() -> list[str]:
    """The functions, and no more."""
    return [*__all__, "__doc__", "__file__", "__name__"]
