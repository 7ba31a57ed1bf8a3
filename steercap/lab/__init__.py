"""Lab: science functions that take an open model, and their results. Nothing outside of the lab needs it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steercap.lab import datasets, directions, measures, mechanism, personas, studies, training

__all__ = ["datasets", "directions", "measures", "mechanism", "personas", "studies", "training"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return import_module(f"steercap.lab.{name}")
    raise AttributeError(f"module 'steercap.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the rooms, those not loaded yet included."""
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})
