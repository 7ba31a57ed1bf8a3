"""Steering: vectors by layer, named sets of them, edits, specs, monitors, and their files."""

from steercap.steering.directions import DirectionSet, Provenance
from steercap.steering.layers import LayerVectors

__all__ = ["DirectionSet", "LayerVectors", "Provenance"]
