"""Repetition of n-grams within an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.measures import Answered, Measure

if TYPE_CHECKING:
    from steercap.model import SteerModel


@dataclass(frozen=True)
class Repetition(Measure):
    """Share of repeated n-grams, 1 - different n-grams / n-grams, over generated tokens: 0 to 1.

    An answer of fewer than n tokens repeats nothing: 0. Source: seq-rep-n of Welleck et al. 2019, Neural Text
    Generation with Unlikelihood Training, arXiv:1908.04319.

    Args:
        n: number of tokens of an n-gram.

    Raises:
        InvalidSpec: n is below 1.
    """

    axis = "share of repeated n-grams"

    n: int = 3

    def __post_init__(self) -> None:
        n = index_of(self.n)
        if n is None or n < 1:
            raise InvalidSpec(f"Repetition: n={shown(self.n)}; give a whole number, 1 or more")
        object.__setattr__(self, "n", n)

    @property
    def label(self) -> str:
        return "repetition"

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:  # noqa: ARG002 -- not asked
        return [self._share(record.output_token_ids) for record in records]

    def _share(self, tokens: Sequence[int]) -> float:
        grams = [tuple(tokens[at : at + self.n]) for at in range(len(tokens) - self.n + 1)]
        return 1 - len(set(grams)) / len(grams) if grams else 0.0


MEMBER = Repetition
