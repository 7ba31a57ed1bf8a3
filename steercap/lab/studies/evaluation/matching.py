"""Interpolation of the dose at which a method has a given cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from steercap.lab.measures.statistics import Floats

#: Tolerance for being at a dose, as a share of the step: costs are exponentials of logarithms.
ROUNDING: Final = 1e-9


@dataclass(frozen=True)
class Place:
    """Dose between two that were tried.

    Args:
        low, high: tried doses on both sides; equal if it is one of them. Dose 0 is no steering.
        share: position from the first to the second, in [0, 1].
        reached: True if the method has the wanted cost there.
    """

    low: float
    high: float
    share: float
    reached: bool

    @property
    def dose(self) -> float:
        """Interpolated dose."""
        return self.low + self.share * (self.high - self.low)

    def between(self, at: Mapping[float, Floats]) -> Floats:
        """Interpolate values measured at both doses; for a factor, its logarithm.

        Args:
            at: float64 [clusters] by dose, 0 included.
        """
        if self.low == self.high or not self.share:
            return at[self.low]
        found: Floats = (1 - self.share) * at[self.low] + self.share * at[self.high]
        return found


def path(doses: Sequence[float]) -> list[float]:
    """Return the doses in order from 0 upwards; if all are below 0, from 0 downwards.

    Args:
        doses: tried doses, without 0.
    """
    up = sorted(dose for dose in doses if dose > 0)
    return [0.0, *(up or sorted(doses, reverse=True))]


def place_of(costs: Mapping[float, float], wanted: float) -> Place:
    """Find where the cost first equals the wanted one, on straight lines from dose to dose.

    Args:
        costs: costs by dose, in the order of the path; for a factor, its logarithm.
        wanted: wanted cost, on the same scale.

    Returns:
        The place; if the cost is never reached, the dose with the highest cost, except dose 0, marked as not reached.
    """
    doses = list(costs)
    for low, high in pairwise(doses):
        first, second = costs[low], costs[high]
        share = (wanted - first) / (second - first) if second != first else 0.0 if wanted == first else -1.0
        if abs(share) <= ROUNDING:
            return _at(low)
        if abs(share - 1) <= ROUNDING:
            return _at(high)
        if 0 < share < 1:
            return Place(low, high, share, reached=True)
    if len(doses) == 1 and costs[doses[0]] == wanted:
        return _at(doses[0])
    most = max([dose for dose in doses if dose] or doses, key=costs.__getitem__)  # not at no steering
    return Place(most, most, 0.0, reached=False)


def _at(dose: float) -> Place:
    return Place(dose, dose, 0.0, reached=True)
