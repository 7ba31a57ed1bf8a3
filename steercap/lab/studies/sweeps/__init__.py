"""Sweeps over vectors, layers, operations and scales of steering in one engine, with controls."""

from steercap.lab.measures import MEASURES, Answered, Measure
from steercap.lab.studies.sweeps.grid import Sweep, SweepCondition
from steercap.lab.studies.sweeps.operations import OPERATIONS
from steercap.lab.studies.sweeps.running import SweepResults, run_sweep
from steercap.lab.studies.sweeps.summaries import Effect, Summary

__all__ = [
    "MEASURES",
    "OPERATIONS",
    "Answered",
    "Effect",
    "Measure",
    "Summary",
    "Sweep",
    "SweepCondition",
    "SweepResults",
    "run_sweep",
]
