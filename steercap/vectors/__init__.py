"""Directions: vectors by layer, sets of them with their provenance, and how they are found in a model's rows."""

from steercap.vectors.directions import DirectionSet, Provenance
from steercap.vectors.extraction import Contrast, Exchange, extract, mean_rows
from steercap.vectors.layers import LayerVectors
from steercap.vectors.methods import METHODS

__all__ = ["METHODS", "Contrast", "DirectionSet", "Exchange", "LayerVectors", "Provenance", "extract", "mean_rows"]
