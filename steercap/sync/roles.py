"""Roles and the assistant axis without `await`: twins of functions in `steercap.lab.personas.roles`."""

from steercap.lab.personas.roles import axis_capping as _capping
from steercap.lab.personas.roles import effects as _effects
from steercap.lab.personas.roles import pipeline as _there
from steercap.sync.twins import blocking

__all__ = ["calibrated_capping", "compare_steering", "projections_by_text", "run", "run_share", "token_projections"]

run = blocking(_there.run)
run_share = blocking(_there.run_share)
calibrated_capping = blocking(_capping.calibrated_capping)
token_projections = blocking(_capping.token_projections)
projections_by_text = blocking(_capping.projections_by_text)
compare_steering = blocking(_effects.compare_steering)


def __dir__() -> list[str]:
    """Return the names of the functions."""
    return [*__all__, "__doc__", "__file__", "__name__"]
