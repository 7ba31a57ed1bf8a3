"""Reader of training examples in JSONL files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steercap.cli.prompts import records_of
from steercap.errors import InvalidFile

if TYPE_CHECKING:
    from steercap.lab.training.training import AnyExample

#: Fields of a line for each kind of example, besides `source` and `trait`.
FORMS: Final = "{'prompt', 'response'}, {'prompt', 'chosen', 'rejected'} or {'system', 'prompt', 'response'}"


def examples_in(path: Path, name: str) -> dict[str, list[AnyExample]]:
    """Read the examples of a JSONL file, by trait.

    Args:
        path: file with an object per line, with the fields of `Example`, `Preference` or `Prompted`, and a `trait`
            where several are to be trained.
        name: trait of lines without `trait`.

    Raises:
        InvalidFile: it cannot be read, or a line is not an example.
    """
    found: dict[str, list[AnyExample]] = {}
    for number, value in records_of(str(path)):
        given = dict(value) if isinstance(value, dict) else {}
        trait = str(given.pop("trait", name))
        try:
            found.setdefault(trait, []).append(_kind(given)(**given))
        except (TypeError, LookupError, msgspec.ValidationError) as error:
            raise InvalidFile(
                f"{path}, line {number}: {value!r}; give {FORMS}, each with or without 'source'"
            ) from error
    return found


def _kind(given: dict[str, Any]) -> Callable[..., AnyExample]:
    """Return the class of an example with these fields.

    Raises:
        LookupError: no class has them.
    """
    from steercap.lab.training import Example, Preference, Prompted

    forms = {("prompt", "response"): Example, ("chosen", "prompt", "rejected"): Preference}
    return {**forms, ("prompt", "response", "system"): Prompted}[tuple(sorted(given.keys() - {"source"}))]
