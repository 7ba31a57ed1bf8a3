"""Experiments: many ways of steering in one engine, with the controls that say what they are worth."""

from steercap.experiments.grid import Condition, Sweep
from steercap.experiments.measures import MEASURES
from steercap.experiments.measures.base import Answered, Measure
from steercap.experiments.operations import OPERATIONS
from steercap.experiments.results import SweepResults
from steercap.experiments.running import run_sweep
from steercap.experiments.summaries import Effect, Summary

__all__ = [
    "MEASURES",
    "OPERATIONS",
    "Answered",
    "Condition",
    "Effect",
    "Measure",
    "Summary",
    "Sweep",
    "SweepResults",
    "run_sweep",
]
