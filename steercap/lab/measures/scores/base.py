"""Base class of scorers, which rate how strongly answers show a trait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from steercap.lab.measures.trait import Trait


class Scored(NamedTuple):
    """Question and answer to score.

    Args:
        question: text of the question; "" for none.
        answer: text of the answer.
    """

    question: str
    answer: str


class Scorer(ABC):
    """Scorer of a trait; frozen, made from its settings."""

    @abstractmethod
    async def score(self, trait: Trait, exchanges: Sequence[Scored]) -> list[float | None]:
        """Score how strongly each answer shows the trait.

        Args:
            trait: the trait.
            exchanges: answers to score, in any number.

        Returns:
            One number each, 0 (not at all) to 100 (wholly); None if it cannot be scored, such as for an empty answer.
        """
