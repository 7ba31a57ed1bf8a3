"""Parsers of layers, sites and tokens given on the command line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from steercap.core.spec import Layers


def layers_of(text: str) -> Layers:
    """Parse layers: "all", "8", "8,16,-1" or "4:20:2".

    Raises:
        typer.BadParameter: the text is not of this form.
    """
    if text.strip() == "all":
        return "all"
    if ":" in text:
        return _slice(text)
    return [_integer(part, text) for part in text.split(",")]


def tokens_of(text: str) -> Any:
    """Parse tokens: a name, "3", "-5:", or several of these separated by commas.

    Raises:
        typer.BadParameter: the text is not of this form.
    """
    found = [_tokens(part.strip(), text) for part in text.split(",")]
    return found[0] if len(found) == 1 else found


def names_of(text: str) -> tuple[str, ...]:
    """Parse names separated by commas.

    Raises:
        typer.BadParameter: there are none.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise typer.BadParameter(f"{text!r} names nothing")
    return names


def numbers_of(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas.

    Raises:
        typer.BadParameter: an entry is not a number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give numbers with commas between, such as 0.5,1,2") from None


def _tokens(part: str, text: str) -> Any:
    from steercap.core.tokens import NAMES

    if part in NAMES:
        return part
    if ":" in part:
        return _slice(part)
    if re.fullmatch(r"-?\d+", part):
        return int(part)
    known = ", ".join(NAMES)
    raise typer.BadParameter(
        f"{text!r}: give {known}, a position such as -1, a slice such as 2:10, or several: prompt,-1"
    )


def _slice(text: str) -> slice:
    parts = text.split(":")
    if len(parts) > 3:
        raise typer.BadParameter(f"{text!r}: a slice is start:stop or start:stop:step")
    return slice(*(_integer(part, text) if part.strip() else None for part in parts))


def _integer(part: str, text: str) -> int:
    try:
        return int(part)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: give all, an index, several such as 8,16,-1, or a slice such as 4:20:2"
        ) from None
