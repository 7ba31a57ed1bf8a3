"""Checks of the settings that sweeps and evaluations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from steercap.core.values import flag_of, index_of, shown
from steercap.errors import InvalidSpec

Definition = TypeVar("Definition", bound=msgspec.Struct)


def settle(study: Any, *, whole: Sequence[str], flags: Sequence[str]) -> None:
    """Check a study's numbers, truth values and sampling, and convert them to plain ones, in place.

    Args:
        study: frozen data class with fields `sampling` and `samples`; messages begin with the name of its class.
        whole, flags: names of its fields that are whole numbers, and of those that are truth values.

    Raises:
        InvalidSpec: a field is of another type, `samples` is below 1, the sampling sets `n` or `seed`, or all samples
            would be the same text.
    """
    said = type(study).__name__
    kinds: list[tuple[Sequence[str], Callable[[Any], Any], str]] = [
        (flags, flag_of, "True or False"),
        (whole, index_of, "a whole number"),
    ]
    for names, read, what in kinds:
        for name in names:
            value = read(getattr(study, name))
            if value is None:
                raise InvalidSpec(f"{said}: {name}={shown(getattr(study, name))}; give {what}")
            object.__setattr__(study, name, value)
    if not isinstance(study.sampling, Mapping):
        raise InvalidSpec(f"{said}: sampling={shown(study.sampling)}; give a dict of vLLM's sampling parameters")
    if taken := {"n", "seed"} & set(study.sampling):
        raise InvalidSpec(f"{said}: sampling has {sorted(taken)}, which are set by samples= and seed=; leave them out")
    object.__setattr__(study, "sampling", dict(study.sampling))
    if study.samples < 1:
        raise InvalidSpec(f"{said}: samples={study.samples}; give 1 or more")
    if study.samples > 1 and study.sampling.get("temperature") == 0:
        raise InvalidSpec(
            f"{said}: samples={study.samples} at temperature 0 would all be the same text; raise it, or set samples=1"
        )


def as_stored(study: Any, definition: Definition) -> Definition:
    """Return the definition of a study as it is read from its folder.

    Raises:
        InvalidSpec: a prompt or sampling parameter is not JSON-compatible.
    """
    try:
        return msgspec.json.decode(msgspec.json.encode(definition), type=type(definition))
    except (TypeError, msgspec.MsgspecError) as error:
        raise InvalidSpec(
            f"{type(study).__name__}: prompts or sampling hold what JSON cannot represent: {error}"
        ) from error
