"""Sweeps, without `await`: the functions of `steercap.lab.studies.sweeps` that take an open model."""

from steercap.lab.studies.sweeps import running as _there
from steercap.sync.twins import blocking

__all__ = ["run_sweep"]

run_sweep = blocking(_there.run_sweep)


def __dir__() -> list[str]:
    """The functions, and no more."""
    return [*__all__, "__doc__", "__file__", "__name__"]
