"""Activation patching: effects of one run's rows in another run, point by point, for one pair of prompts or many."""

from steercap.lab.mechanism.patching.activation import ablate, patch
from steercap.lab.mechanism.patching.metrics import LogitDifference, LogProbability, Measured, Metric, MetricRequest
from steercap.lab.mechanism.patching.paths import Receiver, path_patch
from steercap.lab.mechanism.patching.points import Grid
from steercap.lab.mechanism.patching.results import Effects, PatchEffect

__all__ = [
    "Effects",
    "Grid",
    "LogProbability",
    "LogitDifference",
    "Measured",
    "Metric",
    "MetricRequest",
    "PatchEffect",
    "Receiver",
    "ablate",
    "patch",
    "path_patch",
]
