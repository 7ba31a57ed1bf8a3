"""Scorers of traits, one file each: base class and registry. To add one, add a file whose `MEMBER` is its class."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from steercap.core.registry import Registry
from steercap.core.values import choices, shown
from steercap.errors import InvalidSetting
from steercap.lab.measures.trait import Trait


class Scored(NamedTuple):
    """Question and answer to score.

    Args:
        question: text of the question; "" for none.
        answer: text of the answer.
    """

    question: str
    answer: str


class Scorer(ABC):
    """Scorer of a trait; frozen, made from its settings."""

    @abstractmethod
    async def score(self, trait: Trait, exchanges: Sequence[Scored]) -> list[float | None]:
        """Score how strongly each answer shows the trait.

        Args:
            trait: the trait.
            exchanges: answers to score, in any number.

        Returns:
            One number each, 0 (not at all) to 100 (wholly); None if it cannot be scored, such as for an empty answer.
        """


__all__ = ["SCORERS", "Scored", "Scorer", "make_scorer"]

#: Every scorer by the name of its file; members are subclasses of `Scorer`.
SCORERS: Registry[type[Scorer]] = Registry("scorer", sys.modules[__name__], type)


def make_scorer(name: str, arguments: Mapping[str, Any] | None = None) -> Scorer:
    """Return a scorer from its name and arguments, as in settings.

    Args:
        name: name in `SCORERS`.
        arguments: arguments of its class.

    Raises:
        UnknownName: no scorer has this name.
        InvalidSetting: an argument is unknown, missing, or not valid.
    """
    if not isinstance(arguments, (Mapping, type(None))):
        raise InvalidSetting(f"the arguments of scorer {name!r} are {shown(arguments)}; give a dict")
    kind, given = SCORERS[name], dict(arguments or {})
    wanted = inspect.signature(kind).parameters
    if unknown := [key for key in given if key not in wanted]:
        raise InvalidSetting(
            f"scorer {name!r} has no argument {', '.join(map(str, unknown))}; {choices(unknown[0], wanted)}"
        )
    if missing := [key for key, one in wanted.items() if one.default is one.empty and key not in given]:
        example = ", ".join(f"{key}=..." for key in missing)
        raise InvalidSetting(
            f"scorer {name!r} needs {' and '.join(missing)}; give them as its arguments (scorer_args, --scorer-arg), "
            f"or make the scorer: {kind.__name__}({example})"
        )
    return kind(**given)
