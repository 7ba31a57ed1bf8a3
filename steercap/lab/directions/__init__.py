"""Directions from texts: a model's rows for two kinds of texts, and the direction between them."""

from steercap.lab.directions.contrast import Contrast, directions_of, random_like, separability
from steercap.lab.directions.extraction import Exchange, Rows, calibrate, extract, mean_rows
from steercap.lab.directions.methods import METHODS, Suggestion, chance_band, suggested_layer

__all__ = [
    "METHODS",
    "Contrast",
    "Exchange",
    "Rows",
    "Suggestion",
    "calibrate",
    "chance_band",
    "directions_of",
    "extract",
    "mean_rows",
    "random_like",
    "separability",
    "suggested_layer",
]
