"""Measures of answers from 0 to 100: of a trait, by a scorer; of one kind of text against another, by a classifier."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from steercap.core.hints import dataclass
from steercap.core.values import choices, parts_of, shown
from steercap.errors import InvalidSpec, UnknownName
from steercap.lab.measures import Answered, Measure
from steercap.lab.measures.scores import Scored, Scorer, Trait, make_scorer, shipped_traits
from steercap.lab.measures.scores.minilm import chances, fitted

if TYPE_CHECKING:
    from steercap.model import SteerModel


@dataclass(frozen=True)
class Score(Measure):
    """Measure of how strongly an answer shows a trait, 0 (not at all) to 100 (wholly); NaN if it cannot be scored.

    Args:
        trait: a trait, or the name of one shipped with steercap.
        scorer: a scorer, or the name of one in `SCORERS` that needs no arguments.

    Raises:
        UnknownName: there is no trait or scorer of this name.
        InvalidSetting: the scorer needs arguments, such as the judge; construct it yourself.
        InvalidSpec: the trait or the scorer is of another type.
    """

    axis = "trait score, 0 to 100"

    trait: Trait | str
    scorer: Scorer | str = "minilm"

    def __post_init__(self) -> None:
        if isinstance(self.trait, str):
            if self.trait not in shipped_traits():
                raise UnknownName(f"unknown trait {self.trait!r}; {choices(self.trait, shipped_traits())}")
            object.__setattr__(self, "trait", shipped_traits()[self.trait])
        if isinstance(self.scorer, str):
            object.__setattr__(self, "scorer", make_scorer(self.scorer))
        if not isinstance(self.trait, Trait) or not isinstance(self.scorer, Scorer):
            raise InvalidSpec(
                f"Score(trait={shown(self.trait)}, scorer={shown(self.scorer)}); give a Trait or the name "
                "of one, and a Scorer or the name of one"
            )

    @property
    def label(self) -> str:
        assert isinstance(self.trait, Trait)
        return self.trait.name

    @property
    def key(self) -> str:
        assert isinstance(self.scorer, Scorer)
        return f"Score(trait={self.trait!r}, scorer={self.scorer.key})"

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:  # noqa: ARG002 -- not asked
        assert isinstance(self.trait, Trait)
        assert isinstance(self.scorer, Scorer)
        found = await self.scorer.score(self.trait, [Scored(record.prompt, record.text) for record in records])
        return [math.nan if score is None else float(score) for score in found]


@dataclass(frozen=True)
class Classifier(Measure):
    """Measure: 100 times the mean, over an answer's sentences, of the probability that it is of the positive kind.

    A logistic regression on all-MiniLM-L6-v2's embeddings, as in the scorer "minilm", but fitted to your texts: a
    model's answers under opposite system prompts, say, to other questions than those evaluated.

    Args:
        name: name of the measure.
        positive, negative: texts of each kind, two at least; each is embedded as a whole.

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


@functools.lru_cache(maxsize=8)  # of hundreds of data sets, those in progress
def _probe(positive: tuple[str, ...], negative: tuple[str, ...]) -> Any:
    return fitted(positive, negative)


MEMBERS: Final[Mapping[str, type[Measure]]] = {"classifier": Classifier, "score": Score}
