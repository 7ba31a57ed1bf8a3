"""Answers of a sweep, means of their values by condition, and effects of a vector beside its controls."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from steercap.lab.measures import Answered
from steercap.lab.studies.sweeps.grid import Condition, Request


class Record(Answered, frozen=True, kw_only=True):
    """Answer of a sweep, with its condition; see `Condition` and `Answered`.

    Args:
        number: number in the sweep.
        prompt_index, sample: index of the prompt, and of the answer to it.
        finish_reason: vLLM's finish reason: "stop" or "length".
    """

    number: int
    vector: str
    operation: str
    layers: tuple[int, ...]
    scale: float
    control: str
    prompt_index: int
    sample: int
    finish_reason: str

    @property
    def condition(self) -> Condition:
        """Condition by which it was steered."""
        return Condition(**{name: getattr(self, name) for name in Condition.__struct_fields__})

    def answers(self, request: Request) -> bool:
        """Return True if it is the answer to a request."""
        asked = (request.number, request.condition, request.prompt, request.sample)
        return (self.number, self.condition, self.prompt_index, self.sample) == asked


class Mean(msgspec.Struct, frozen=True):
    """Mean of a measure under one condition.

    Args:
        value: mean over prompts of the mean over each prompt's answers; for a measure that is a factor (`Measure.log`)
            the geometric one. NaN if nothing could be measured.
        error: standard error over prompts, for a factor of its logarithm; NaN for fewer than two prompts.
        count: number of answers that could be measured.
    """

    value: float
    error: float
    count: int


class Summary(msgspec.Struct, frozen=True):
    """Means of all measures under one condition.

    Args:
        condition: condition of the answers.
        answers: number of answers.
        means: means by measure.
    """

    condition: Condition
    answers: int
    means: dict[str, Mean]


class Effect(msgspec.Struct, frozen=True):
    """Effect of a vector at one scale on one measure, with its controls.

    Args:
        condition: condition of the vector.
        steered, plain: means with the vector, and without steering.
        turned: mean at the scale of the opposite sign, None if that was not swept.
        random: means of the random vectors at the same place and scale, in their order.
    """

    condition: Condition
    steered: Mean
    plain: Mean
    turned: Mean | None
    random: tuple[float, ...]

    @property
    def outside(self) -> float:
        """Distance of the mean outside the range of the random vectors, over the width of that range; 0 inside.

        Infinite if all random vectors agree, NaN without them, or if one of these means is NaN.
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
