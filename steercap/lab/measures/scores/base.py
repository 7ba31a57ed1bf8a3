"""What a scorer is: how strongly answers show a trait, as a number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from steercap.lab.measures.trait import Trait


class Scored(NamedTuple):
    """What is scored.

    Args:
        question: what was asked; "" where there was no question.
        answer: the text.
    """

    question: str
    answer: str


class Scorer(ABC):
    """A way to score; frozen, made from its settings."""

    @abstractmethod
    async def score(self, trait: Trait, exchanges: Sequence[Scored]) -> list[float | None]:
        """How strongly each answer shows the trait.

        Args:
            trait: the trait.
            exchanges: what is scored, in any number.

        Returns:
            One number each, 0 (not at all) to 100 (wholly); None where the scorer can say nothing, such as of an
            empty answer.
        """
