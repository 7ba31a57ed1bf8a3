"""Examples to train on, as they are written in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steercap.cli.prompts import records_of
from steercap.errors import InvalidFile

if TYPE_CHECKING:
    from steercap.lab.training.training import AnyExample

#: What a line may hold for each kind of example, besides `source` and `trait`.
FORMS: Final = "{'prompt', 'response'}, {'prompt', 'chosen', 'rejected'} or {'system', 'prompt', 'response'}"


def examples_in(path: Path, name: str) -> dict[str, list[AnyExample]]:
    """The examples of a JSONL file, by the trait that they are of.

    Args:
        path: an example a line: an object with the fields of `Example`, `Preference` or `Prompted`, and a `trait` where
            several are to be trained.
        name: of the trait of lines that name none.

    Raises:
        InvalidFile: it cannot be read, or a line is none of these.
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
    """The kind of example that has these fields.

    Raises:
        LookupError: none has.
    """
    from steercap.lab.training import Example, Preference, Prompted

    forms = {("prompt", "response"): Example, ("chosen", "prompt", "rejected"): Preference}
    return {**forms, ("prompt", "response", "system"): Prompted}[tuple(sorted(given.keys() - {"source"}))]
