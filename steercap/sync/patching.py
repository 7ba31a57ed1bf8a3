"""Activation patching without `await`: twins of functions in `steercap.lab.mechanism.patching`."""

from steercap.lab.mechanism.patching import activation as _activation
from steercap.lab.mechanism.patching import paths as _paths
from steercap.sync.twins import blocking

__all__ = ["ablate", "patch", "path_patch"]

ablate = blocking(_activation.ablate)
patch = blocking(_activation.patch)
path_patch = blocking(_paths.path_patch)


def __dir__() -> list[str]:
    """Return the names of the functions."""
    return [*__all__, "__doc__", "__file__", "__name__"]
