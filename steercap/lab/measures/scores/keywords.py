"""Scorer by keyword density: the number of a trait's keywords per word of the answer. Quick and crude."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from steercap.core.hints import dataclass
from steercap.core.values import number_of, shown
from steercap.errors import InvalidSetting
from steercap.lab.measures.scores import Scored, Scorer, Trait, straightened


@dataclass(frozen=True)
class Keywords(Scorer):
    """Scorer by keywords: 100 (1 - exp(-n / (words * density))) for n keywords and phrases of the trait in an answer.

    Whole words match, in any case, across line ends, and with typographic apostrophes too. An answer without keyword
    scores 0, one of the given density 63, one without a word None.

    Args:
        density: keywords per word at which the score is 63, in (0, 1].

    Raises:
        InvalidSetting: the density is out of range.
    """

    density: float = 0.05

    def __post_init__(self) -> None:
        density = number_of(self.density)
        if density is None or not 0 < density <= 1:
            raise InvalidSetting(f"density={shown(self.density)}; give a share of the words, more than 0 and at most 1")
        object.__setattr__(self, "density", density)

    async def score(self, trait: Trait, exchanges: Sequence[Scored]) -> list[float | None]:
        pattern = _pattern(trait)
        return [self._score_of(pattern, exchange.answer) for exchange in exchanges]

    def _score_of(self, pattern: re.Pattern[str], answer: str) -> float | None:
        words = len(re.findall(r"\w+(?:['’]\w+)*", answer))
        if not words:
            return None
        found = len(pattern.findall(straightened(answer)))
        return 100 * (1 - math.exp(-found / (words * self.density)))


def _pattern(trait: Trait) -> re.Pattern[str]:
    # Longest first, so that a phrase counts once and not as the word it begins with.
    wanted = sorted(map(straightened, trait.keywords), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, wanted))})(?!\w)", re.IGNORECASE)


MEMBER = Keywords
