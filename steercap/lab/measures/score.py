"""Trait score of answers, by a scorer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steercap.core.values import choices, shown
from steercap.errors import InvalidSpec, UnknownName
from steercap.lab.measures import Answered, Measure
from steercap.lab.measures.scores import Scored, Scorer, make_scorer
from steercap.lab.measures.trait import Trait, traits

if TYPE_CHECKING:
    from steercap.model import SteerModel


@dataclass(frozen=True)
class Score(Measure):
    """Score of a trait, 0 (not at all) to 100 (wholly); NaN if the scorer gives none.

    Args:
        trait: a trait, or the name of one that comes with steercap.
        scorer: a scorer, or the name of one in `SCORERS` that needs no arguments.

    Raises:
        UnknownName: there is no trait or scorer of this name.
        InvalidSetting: the scorer needs arguments, such as the judge; construct it yourself.
        InvalidSpec: the trait or the scorer is of the wrong type.
    """

    axis = "trait score, 0 to 100"

    trait: Trait | str
    scorer: Scorer | str = "minilm"

    def __post_init__(self) -> None:
        if isinstance(self.trait, str):
            if self.trait not in traits():
                raise UnknownName(f"unknown trait {self.trait!r}; {choices(self.trait, traits())}")
            object.__setattr__(self, "trait", traits()[self.trait])
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

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:  # noqa: ARG002 -- not asked
        assert isinstance(self.trait, Trait)
        assert isinstance(self.scorer, Scorer)
        found = await self.scorer.score(self.trait, [Scored(record.prompt, record.text) for record in records])
        return [math.nan if score is None else float(score) for score in found]


MEMBER = Score
