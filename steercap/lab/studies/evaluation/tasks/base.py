"""What a task is: fixed texts that the model reads under a method, and a number for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec


class Item(NamedTuple):
    """What is read.

    Args:
        prompt: what the user says.
        lead: how the answer begins: read as if the model had written it, and not scored.
        texts: ways to go on, each read by itself after the lead, and scored.
    """

    prompt: str
    lead: str
    texts: tuple[str, ...]


def first_of(items: Sequence[Item], first: int | None, what: str) -> Sequence[Item]:
    """The first items of a task.

    Args:
        items: all of them.
        first: how many; None for all.
        what: the task, for the message.

    Raises:
        InvalidSpec: there are not as many.
    """
    count = len(items) if first is None else index_of(first)
    if count is None or not 1 <= count <= len(items):
        raise InvalidSpec(f"{what}: first={shown(first)}; give a whole number from 1 to {len(items)}, or None for all")
    return items[:count]


class Task(ABC):
    """Fixed texts, and a number for each item, from log probabilities of tokens. Its `repr` says all that the number
    depends on: kept values are recognised by it.

    The texts are read as answers after the prompt of a method, its system prompt included, and its edits are where they
    would be if the model had written them: those of tokens="generated" begin behind the prompt.
    """

    #: Whether it is a factor, so that its mean is the geometric one and its axis logarithmic.
    log: ClassVar[bool] = False
    #: What it is called on an axis, with its unit.
    axis: ClassVar[str] = ""
    #: Whether more of it is better, less of it, or neither.
    better: ClassVar[str] = ""

    @property
    @abstractmethod
    def label(self) -> str:
        """Its column in tables."""

    @property
    @abstractmethod
    def items(self) -> Sequence[Item]:
        """What is read, always in one order."""

    @abstractmethod
    def value(self, item: int, logprobs: Sequence[npt.NDArray[np.float64]]) -> float:
        """The number of one item.

        Args:
            item: its index.
            logprobs: natural log probability of each token of each of its texts: float64 [tokens] each.
        """
