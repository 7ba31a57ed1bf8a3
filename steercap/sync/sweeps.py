"""Steering sweeps without `await`: twins of functions in `steercap.lab.studies.sweeps`."""

from steercap.lab.studies.sweeps import running as _there
from steercap.sync.twins import blocking

__all__ = ["run_sweep"]

run_sweep = blocking(_there.run_sweep)


def __dir__() -> list[str]:
    """Return the names of the functions."""
    return [*__all__, "__doc__", "__file__", "__name__"]
