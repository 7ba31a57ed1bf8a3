"""Registry of scorers of traits, one file each. To add one, add a file whose `MEMBER` is its class."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from steercap.core.registry import Registry
from steercap.core.values import choices, shown
from steercap.errors import InvalidSetting
from steercap.lab.measures.scores.base import Scored, Scorer

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
            f"scorer {name!r} must be told {' and '.join(missing)}; give them as its arguments (scorer_args, "
            f"--scorer-arg), or make the scorer: {kind.__name__}({example})"
        )
    return kind(**given)
