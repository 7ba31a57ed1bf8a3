"""What a measure is: answers go in, a number for each comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec

if TYPE_CHECKING:
    from steercap.model import SteerModel


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and what the model went on with.

    Args:
        prompt: the text; of a conversation, the last message.
        prompt_token_ids: what the model read.
        text: what it wrote.
        output_token_ids: the same as ids, the one that ended it included.
    """

    prompt: str
    prompt_token_ids: tuple[int, ...]
    text: str
    output_token_ids: tuple[int, ...]


class Measure(ABC):
    """A number for an answer. Its `repr` says all that the number depends on: kept values are recognised by it."""

    #: Whether it is a factor, so that its mean is the geometric one and its axis logarithmic.
    log: ClassVar[bool] = False
    #: What it is called on an axis, with its unit.
    axis: ClassVar[str] = ""

    @property
    @abstractmethod
    def label(self) -> str:
        """Its column in tables."""

    @abstractmethod
    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:
        """One number for each answer, in their order; NaN where there is nothing to measure.

        Args:
            model: the open model that gave the answers, for those who ask it.
            records: the answers.
        """
