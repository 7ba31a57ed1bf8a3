"""Where a method costs a given amount: between which of its doses, and how far from the lesser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from steercap.lab.measures.statistics import Floats

#: What is this little beyond a dose, in shares of the way to it, is at it: costs are exponentials of logarithms.
ROUNDING: Final = 1e-9


@dataclass(frozen=True)
class Place:
    """A dose between two that were tried.

    Args:
        low, high: the two; equal where it is one of them. Dose 0 is no steering.
        share: how far it is from the lesser to the greater, in [0, 1].
        reached: whether the method costs there what was wanted.
    """

    low: float
    high: float
    share: float
    reached: bool

    @property
    def dose(self) -> float:
        """The dose."""
        return self.low + self.share * (self.high - self.low)

    def between(self, at: Mapping[float, Floats]) -> Floats:
        """What has been measured at both, interpolated; of a factor, in its logarithm.

        Args:
            at: float64 [clusters] by dose, 0 included.
        """
        if self.low == self.high or not self.share:
            return at[self.low]
        found: Floats = (1 - self.share) * at[self.low] + self.share * at[self.high]
        return found


def path(doses: Sequence[float]) -> list[float]:
    """The doses from 0 upwards; those below 0 alone from 0 downwards. Where both were tried, it goes upwards.

    Args:
        doses: that were tried, without 0.
    """
    up = sorted(dose for dose in doses if dose > 0)
    return [0.0, *(up or sorted(doses, reverse=True))]


def place_of(costs: Mapping[float, float], wanted: float) -> Place:
    """Where the cost is first what is wanted, going along a straight line from dose to dose.

    Args:
        costs: by dose, in the order of the path; of a factor its logarithm.
        wanted: on the same scale.

    Returns:
        The place; if the cost is nowhere that, the dose that costs most, dose 0 aside, and that it was not reached.
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
