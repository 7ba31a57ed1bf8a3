"""Sweeps, without `await`: the functions of `steercap.experiments` that take an open model."""

from steercap.experiments import running as _there
from steercap.sync.twins import blocking

__all__ = ["run_sweep"]

run_sweep = blocking(_there.run_sweep)


def __dir__() -> list[str]:
    """The functions, and no more."""
    return [*__all__, "__doc__", "__file__", "__name__"]
