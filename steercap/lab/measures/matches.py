"""Measure of matches of a regular expression in answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steercap.core.values import flag_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.measures import Answered, Measure

if TYPE_CHECKING:
    from steercap.model import SteerModel


@dataclass(frozen=True)
class Matches(Measure):
    """1 if an expression is found in the answer, 0 if not; or the number of matches per 100 words.

    Args:
        name: name of the measure.
        pattern: expression for Python's `re`, searched anywhere; case and multi-line matching are set in the pattern:
            "(?im)^dear".
        per_words: count matches per 100 words; NaN for an answer without a word.

    Raises:
        InvalidSpec: the name is empty, the expression is not valid, or it matches an empty text, and so any.
    """

    axis = ""

    name: str
    pattern: str
    per_words: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not isinstance(self.pattern, str):
            raise InvalidSpec(f"Matches(name={shown(self.name)}, pattern={shown(self.pattern)}); give text")
        if flag_of(self.per_words) is None:
            raise InvalidSpec(f"Matches: per_words={shown(self.per_words)}; give True or False")
        try:
            empty = re.compile(self.pattern).search("") is not None
        except re.error as error:
            raise InvalidSpec(f"Matches: {self.pattern!r} is no regular expression: {error}") from error
        if empty:
            raise InvalidSpec(f"Matches: {self.pattern!r} is found in an empty text, and so in any; make it say more")

    @property
    def label(self) -> str:
        return self.name

    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:  # noqa: ARG002 -- not asked
        return [self._one(record.text) for record in records]

    def _one(self, text: str) -> float:
        if not self.per_words:
            return float(re.search(self.pattern, text) is not None)
        words = len(re.findall(r"\w+(?:['’]\w+)*", text))
        return 100 * sum(1 for _ in re.finditer(self.pattern, text)) / words if words else float("nan")


MEMBER = Matches
