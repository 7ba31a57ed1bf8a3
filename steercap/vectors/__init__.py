"""Directions: vectors by layer, sets of them with their provenance, and how they are found in a model's rows."""

from steercap.vectors.calibrating import calibrate
from steercap.vectors.calibration import Calibration
from steercap.vectors.contrast import Contrast, directions_of, separability
from steercap.vectors.directions import DirectionSet, Provenance
from steercap.vectors.extraction import Exchange, Rows, extract, mean_rows
from steercap.vectors.layers import LayerVectors
from steercap.vectors.methods import METHODS
from steercap.vectors.suggestion import Suggestion, chance_band, suggested_layer

__all__ = [
    "METHODS",
    "Calibration",
    "Contrast",
    "DirectionSet",
    "Exchange",
    "LayerVectors",
    "Provenance",
    "Rows",
    "Suggestion",
    "calibrate",
    "chance_band",
    "directions_of",
    "extract",
    "mean_rows",
    "separability",
    "suggested_layer",
]
