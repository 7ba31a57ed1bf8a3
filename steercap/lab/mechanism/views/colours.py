"""Diverging colours for numbers around a centre, and readable text colours on them."""

from __future__ import annotations

import math
from typing import Final

#: From below the centre over it to above: blue, white, orange, which the colour-blind tell apart.
BELOW, CENTRE, ABOVE = (33, 102, 172), (247, 247, 247), (230, 97, 1)
#: Colour of NaN and inf.
UNKNOWN: Final = (200, 200, 200)


def colour(value: float, centre: float, limit: float) -> str:
    """Return the background of a value as #rrggbb; values beyond the limit are clamped, NaN and inf are grey.

    Args:
        value: value to colour.
        centre: value that is white.
        limit: distance from the centre at which colours are full; 0 makes all of them white.
    """
    if not math.isfinite(value):
        return _hex(UNKNOWN)
    share = min(abs(value - centre) / limit, 1.0) if limit else 0.0
    end = ABOVE if value > centre else BELOW
    mixed = [round(middle + share * (full - middle)) for middle, full in zip(CENTRE, end, strict=True)]
    return _hex((mixed[0], mixed[1], mixed[2]))


def ink(background: str) -> str:
    """Return black or white, whichever contrasts more with a background of #rrggbb."""
    return "#000000" if contrast("#000000", background) >= contrast("#ffffff", background) else "#ffffff"


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours of #rrggbb, from 1 to 21. Source: WCAG 2.2."""
    darker, lighter = sorted((_luminance(first), _luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _hex(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
