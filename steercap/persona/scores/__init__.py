"""HOW MUCH: one file a scorer, from answers to numbers. To add one, add a file whose `MEMBER` is its class."""

import sys
from collections.abc import Mapping
from typing import Any

from steercap.core.registry import Registry
from steercap.errors import InvalidSetting
from steercap.persona.scores.base import Scored, Scorer

__all__ = ["SCORERS", "Scored", "Scorer", "make_scorer"]

#: Every scorer by the name of its file; members are subclasses of `Scorer`.
SCORERS: Registry[type[Scorer]] = Registry("scorer", sys.modules[__name__], type)


def make_scorer(name: str, arguments: Mapping[str, Any] | None = None) -> Scorer:
    """A scorer from its name and arguments, as settings hold them.

    Args:
        name: in `SCORERS`.
        arguments: of its class.

    Raises:
        UnknownName: no scorer has this name.
        InvalidSetting: an argument that is unknown, missing, or does not fit.
    """
    try:
        return SCORERS[name](**(arguments or {}))
    except TypeError as error:
        raise InvalidSetting(f"scorer {name!r} with {dict(arguments or {})!r}: {error}") from error
