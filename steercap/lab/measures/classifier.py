"""Classifier measure: similarity of answers to texts of one kind rather than another, on sentence embeddings."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steercap.core.values import parts_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.measures import Answered, Measure
from steercap.lab.measures.scores.minilm import chances, fitted

if TYPE_CHECKING:
    from steercap.model import SteerModel


@dataclass(frozen=True)
class Classifier(Measure):
    """100 times the mean, over an answer's sentences, of the probability that a sentence is of the positive kind.

    A logistic regression on all-MiniLM-L6-v2's embeddings, as the scorer "minilm", but fitted to texts of yours: a
    model's own answers under opposite system prompts, say, to other questions than those evaluated.

    Args:
        name: name of the measure.
        positive, negative: texts of each kind, two at least; each counts as a whole.

    Raises:
        InvalidSpec: the name is empty, there are too few texts, or one is empty.
    """

    axis = "classifier, 0 to 100"

    name: str
    positive: Sequence[str]
    negative: Sequence[str]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidSpec(f"Classifier: name={shown(self.name)}; give text")
        for kind in ("positive", "negative"):
            given = parts_of(getattr(self, kind), f"Classifier: {kind}") or []
            if len(given) < 2 or not all(isinstance(text, str) and text.strip() for text in given):
                raise InvalidSpec(f"Classifier: {kind}={shown(getattr(self, kind))}; give two texts or more")
            object.__setattr__(self, kind, tuple(given))

    @property
    def label(self) -> str:
        return self.name

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:  # noqa: ARG002 -- not asked
        return await asyncio.to_thread(self._scores, [record.text for record in records])

    def _scores(self, answers: Sequence[str]) -> list[float]:
        found = chances(_probe(tuple(self.positive), tuple(self.negative)), answers)
        return [math.nan if chance is None else 100 * chance for chance in found]


@functools.cache
def _probe(positive: tuple[str, ...], negative: tuple[str, ...]) -> Any:
    return fitted(positive, negative)


MEMBER = Classifier
