"""Extraction of directions from texts without `await`: twins of functions in `steercap.lab.directions`."""

from steercap.lab.directions import calibrating as _calibrating
from steercap.lab.directions import extraction as _there
from steercap.sync.twins import blocking

__all__ = ["calibrate", "extract", "mean_rows"]

calibrate = blocking(_calibrating.calibrate)
extract = blocking(_there.extract)
mean_rows = blocking(_there.mean_rows)


def __dir__() -> list[str]:
    """Return the names of the functions."""
    return [*__all__, "__doc__", "__file__", "__name__"]
