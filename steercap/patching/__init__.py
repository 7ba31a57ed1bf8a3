"""Activation patching: what one run's rows do in another run, point by point, for one pair of prompts or many."""

from steercap.patching.ablation import ablate
from steercap.patching.activation import patch
from steercap.patching.metrics import Asked, LogitDifference, LogProbability, Measured, Metric
from steercap.patching.paths import path_patch
from steercap.patching.points import Grid
from steercap.patching.results import Effects, PatchEffect
from steercap.patching.routes import Receiver

__all__ = [
    "Asked",
    "Effects",
    "Grid",
    "LogProbability",
    "LogitDifference",
    "Measured",
    "Metric",
    "PatchEffect",
    "Receiver",
    "ablate",
    "patch",
    "path_patch",
]
