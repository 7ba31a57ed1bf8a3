"""What a sweep comes to: means by condition, and a vector beside its controls."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from steercap.lab.studies.sweeps.grid import Condition


class Mean(msgspec.Struct, frozen=True):
    """The mean of a measure under one condition.

    Args:
        value: mean over prompts of the mean over each prompt's answers; of a measure that is a factor (`Measure.log`)
            the geometric one. NaN where nothing could be measured.
        error: standard error over prompts, of a factor that of its logarithm; NaN of fewer than two prompts.
        count: answers that could be measured.
    """

    value: float
    error: float
    count: int


class Summary(msgspec.Struct, frozen=True):
    """Means of all measures under one condition.

    Args:
        condition: how answers were steered.
        answers: how many there are.
        means: by measure.
    """

    condition: Condition
    answers: int
    means: dict[str, Mean]


class Effect(msgspec.Struct, frozen=True):
    """A vector at one scale, with its controls, by one measure.

    Args:
        condition: the vector's.
        steered, plain: with the vector, and without steering.
        turned: at the scale of the other sign, None if that was not swept.
        random: means of the random vectors at the same place and scale, in their order.
    """

    condition: Condition
    steered: Mean
    plain: Mean
    turned: Mean | None
    random: tuple[float, ...]

    @property
    def outside(self) -> float:
        """How far the mean lies outside the range of the random vectors, over the width of that range; 0 inside,
        infinite if they all agree, NaN without them, or where one of these means could not be taken.
        """
        if not self.random or any(map(math.isnan, (*self.random, self.steered.value))):
            return math.nan
        low, high = min(self.random), max(self.random)
        beyond = max(low - self.steered.value, self.steered.value - high, 0.0)
        if not beyond:
            return 0.0
        return beyond / (high - low) if high > low else math.inf

    @property
    def deviations(self) -> float:
        """Distance of the mean from that of the random vectors, in their standard deviations.

        Infinite if they all agree and it does not, NaN with fewer than two of them.
        """
        if len(self.random) < 2:
            return math.nan
        spread = float(np.std(self.random, ddof=1))
        apart = self.steered.value - float(np.mean(self.random))
        if not apart:
            return 0.0
        return apart / spread if spread else math.copysign(math.inf, apart)
