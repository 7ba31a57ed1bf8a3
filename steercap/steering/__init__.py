"""What is changed in a model's rows: vectors by layer, sets of them by name, edits, specs, monitors, files."""

from steercap.steering.directions import DirectionSet, Provenance
from steercap.steering.layers import LayerVectors

__all__ = ["DirectionSet", "LayerVectors", "Provenance"]
