"""Layer and position sweeps without `await`: twins of functions in `steercap.lab.mechanism.analysis`."""

from steercap.lab.mechanism.analysis import sweeps as _sweeps
from steercap.sync.twins import blocking

__all__ = ["layer_sweep", "position_sweep"]

layer_sweep = blocking(_sweeps.layer_sweep)
position_sweep = blocking(_sweeps.position_sweep)


def __dir__() -> list[str]:
    """Return the names of the functions."""
    return [*__all__, "__doc__", "__file__", "__name__"]
