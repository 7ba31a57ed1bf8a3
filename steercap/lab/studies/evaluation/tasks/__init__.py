"""Tasks of fixed texts, one file each: base class and registry. To add one, add a file whose `MEMBER` is its class."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import resources
from typing import ClassVar, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.core.extras import extra
from steercap.core.registry import Registry
from steercap.core.values import index_of, shown
from steercap.errors import InvalidSpec

Kind = TypeVar("Kind")


class Item(NamedTuple):
    """Prompt and texts of a task to read.

    Args:
        prompt: text of the user.
        lead: beginning of the answer: read as if the model had written it, and not scored.
        texts: continuations, each read by itself after the lead, and scored.
    """

    prompt: str
    lead: str
    texts: tuple[str, ...]


def first_of(items: Sequence[Item], first: int | None, what: str) -> Sequence[Item]:
    """Return the first items of a task.

    Args:
        items: all items.
        first: number of items; None for all.
        what: name of the task, for the message.

    Raises:
        InvalidSpec: there are not enough items.
    """
    count = len(items) if first is None else index_of(first)
    if count is None or not 1 <= count <= len(items):
        raise InvalidSpec(f"{what}: first={shown(first)}; give a whole number from 1 to {len(items)}, or None for all")
    return items[:count]


@functools.cache
def read_shipped(name: str, kind: type[Kind]) -> Kind:
    """Read texts that come with steercap, written for it and free of any data set, from `evaluation/shipped`.

    Args:
        name: name of the YAML file, without its suffix.
        kind: type to decode to.
    """
    with extra("experiments"):
        import yaml

    text = (resources.files("steercap.lab.studies.evaluation") / "shipped" / f"{name}.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), kind)


class Task(ABC):
    """Task of fixed texts, with a value for each item from log probabilities of tokens.

    The `repr` contains everything that the value depends on: stored values are recognised by it. The texts are read as
    answers after the prompt of a method, its system prompt included, and its edits are placed as if the model had
    generated them: those of tokens="generated" begin after the prompt.
    """

    #: True if it is a factor, with a geometric mean and a logarithmic axis.
    log: ClassVar[bool] = False
    #: Axis label, with its unit.
    axis: ClassVar[str] = ""
    #: Direction of improvement: "more", "less", or "" for neither.
    better: ClassVar[str] = ""

    @property
    @abstractmethod
    def label(self) -> str:
        """Column name in tables."""

    @property
    @abstractmethod
    def items(self) -> Sequence[Item]:
        """Items to read, always in the same order."""

    @abstractmethod
    def value(self, item: int, logprobs: Sequence[npt.NDArray[np.float64]]) -> float:
        """Return the value of one item.

        Args:
            item: index of the item.
            logprobs: natural log probability of each token of each of its texts: float64 [tokens] each.
        """


#: Every task by the name of its file; members are subclasses of `Task`.
TASKS: Registry[type[Task]] = Registry("task", sys.modules[__name__], type)
