"""Steering: vectors by layer, named sets of these, edits, specs, monitors, and their files."""

from typing import TYPE_CHECKING

from steercap.core.extras import lazy_names

if TYPE_CHECKING:
    from steercap.steering.directions import DirectionSet, Provenance
    from steercap.steering.layers import LayerVectors

__all__ = ["DirectionSet", "LayerVectors", "Provenance"]

_HOMES = {"DirectionSet": "directions", "LayerVectors": "layers", "Provenance": "directions"}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
