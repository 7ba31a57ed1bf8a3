"""Multiple-choice questions, answered by log probabilities, to measure remaining knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.core.values import parts_of, shown
from steercap.errors import InvalidSpec
from steercap.lab.studies.evaluation.tasks import Item, Task, first_of, read_shipped


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Question with its answers.

    Args:
        question: text of the question.
        lead: beginning of every answer. It has a few words, so that edits of generated tokens affect the scored tokens:
            the first word of an answer is still predicted by the last token of the prompt.
        right: right continuation.
        wrong: wrong continuations, one at least.
    """

    question: str
    lead: str
    right: str
    wrong: tuple[str, ...]

    def __post_init__(self) -> None:
        texts = [self.right, *self.wrong]
        if not self.wrong or not all(part.strip() for part in (self.question, self.lead, *texts)):
            raise ValueError("question, lead, right and each of wrong hold text, and one of them at least is wrong")
        if len(set(texts)) < len(texts):
            raise ValueError(f"{self.question!r} has an answer twice")


@dataclass(frozen=True)
class Choices(Task):
    """Accuracy of multiple choice: 1 if the right answer has the greatest log probability, summed over tokens, else 0.

    The choice is by probability of the texts, not by letters, which small models do not understand. Equal log
    probabilities count as wrong.

    Args:
        questions: those that come with steercap by default: forty of everyday knowledge, written for it, each with
            three wrong answers of about the same length; chance is 0.25.

        first: number of questions to use, from the first; all by default.

    Raises:
        InvalidSpec: there is no question, an entry is not a Choice, or there are fewer than `first`.
    """

    axis = "accuracy, multiple choice"
    better = "more"

    questions: Sequence[Choice] | None = None
    first: int | None = None

    def __post_init__(self) -> None:
        if self.questions is not None:
            given: list[Any] | None = parts_of(self.questions, "Choices: questions")
            if not given or not all(isinstance(one, Choice) for one in given):
                raise InvalidSpec(f"Choices: questions={shown(self.questions)}; give a list of Choice")
            object.__setattr__(self, "questions", tuple(given))
        _ = self.items

    @property
    def label(self) -> str:
        return "choices"

    @property
    def items(self) -> Sequence[Item]:
        known = self.questions or read_shipped("choices", tuple[Choice, ...])
        items = [
            Item(one.question, one.lead, tuple(f" {text.strip()}" for text in (one.right, *one.wrong))) for one in known
        ]
        return first_of(items, self.first, "Choices")

    def value(self, item: int, logprobs: Sequence[npt.NDArray[np.float64]]) -> float:  # noqa: ARG002 -- all alike
        right, *wrong = (float(tokens.sum()) for tokens in logprobs)
        return float(right > max(wrong))

    def __repr__(self) -> str:
        return f"Choices({[tuple(item) for item in self.items]})"


MEMBER = Choices
