"""Sweeps over vectors, layers, operations and scales of steering in one engine, with controls."""

from steercap.lab.measures import MEASURES, Answered, Measure
from steercap.lab.studies.sweeps.grid import Condition, Sweep
from steercap.lab.studies.sweeps.operations import OPERATIONS
from steercap.lab.studies.sweeps.running import SweepResults, run_sweep
from steercap.lab.studies.sweeps.summaries import Effect, Summary

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
