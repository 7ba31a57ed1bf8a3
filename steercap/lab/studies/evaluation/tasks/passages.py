"""Perplexity of fixed neutral passages under a method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steercap.core.values import shown
from steercap.errors import InvalidSpec
from steercap.lab.studies.evaluation.tasks import Item, Task, first_of, read_shipped


@dataclass(frozen=True)
class Passages(Task):
    """Perplexity of a passage given a question that it answers: exp of the mean negative log-likelihood, 1 or more.

    The passages are the same for every method, so this measures a method's effect on the model's language, apart from
    the subject. A method that asks for another style makes plain prose less likely by design; that is part of its cost.

    Args:
        texts: passages by the question that each answers; those that come with steercap by default: twelve of some 40
            words, written for it, about things that everybody knows.

        first: number of passages to use, from the first; all by default.

    Raises:
        InvalidSpec: there is no passage, an empty one, or fewer than `first`.
    """

    log = True
    axis = "perplexity of neutral prose"
    better = "less"

    texts: Mapping[str, str] | None = None
    first: int | None = None

    def __post_init__(self) -> None:
        if self.texts is not None:
            given = dict(self.texts) if isinstance(self.texts, Mapping) else {}
            if not given or not all(isinstance(part, str) and part.strip() for one in given.items() for part in one):
                raise InvalidSpec(f"Passages: texts={shown(self.texts)}; give passages by the questions they answer")
            object.__setattr__(self, "texts", given)
        _ = self.items

    @property
    def label(self) -> str:
        return "neutral"

    @property
    def items(self) -> Sequence[Item]:
        known = self.texts or read_shipped("passages", dict[str, str])
        return first_of([Item(question, "", (text,)) for question, text in known.items()], self.first, "Passages")

    def value(self, item: int, logprobs: Sequence[npt.NDArray[np.float64]]) -> float:  # noqa: ARG002 -- all alike
        (tokens,) = logprobs
        return math.exp(-float(tokens.mean()))

    def __repr__(self) -> str:
        return f"Passages({[tuple(item) for item in self.items]})"


MEMBER = Passages
