"""Measures of answers, one number per answer: base class and registry.

To add one, add an entry to a file's `MEMBERS`, or a file with a `MEMBER`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec

from steercap.core.display import brief
from steercap.core.registry import Registry

if TYPE_CHECKING:
    from steercap.model import SteerModel


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt with the model's answer, as text and token ids.

    Args:
        prompt: text of the prompt; for a conversation, the last message.
        prompt_token_ids: token ids of the prompt.
        text: text of the answer.
        output_token_ids: token ids of the answer, the one that ended it included.
    """

    prompt: str
    prompt_token_ids: tuple[int, ...]
    text: str
    output_token_ids: tuple[int, ...]

    __repr__ = brief


class Measure(ABC):
    """Measure of answers. Its `key` contains all that the value depends on: stored values are recognised by it."""

    #: True for values that are factors: averaged by the geometric mean, with a logarithmic axis.
    log: ClassVar[bool] = False
    #: Axis label in plots, with the unit.
    axis: ClassVar[str] = ""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the measure's column in tables."""

    @property
    def key(self) -> str:
        """Text that contains everything the value depends on; its `repr`, where that has nothing else."""
        return repr(self)

    @abstractmethod
    async def measure(self, model: SteerModel, records: Sequence[Answered]) -> list[float]:
        """Return one number for each answer, in order; NaN if the answer has nothing to measure.

        Args:
            model: open model that generated the answers, for measures that run it.
            records: the answers.
        """


#: Registry of measure classes, subclasses of `Measure`, by name, such as "perplexity".
MEASURES: Registry[type] = Registry("measure", sys.modules[__name__], type)
