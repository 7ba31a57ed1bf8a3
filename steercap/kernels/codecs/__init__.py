"""Registry of the encodings of rows: one file per encoding. To add one, add a file with a `MEMBER`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from steercap.core.coding import RAW, Coding
from steercap.core.records import RecordShape
from steercap.core.registry import Registry
from steercap.core.schema import PointSchema
from steercap.core.values import choices
from steercap.errors import InvalidSpec, UnknownName
from steercap.kernels.codecs.base import Encoding

ENCODINGS: Registry[Encoding] = Registry("encoding", sys.modules[__name__], Encoding)


def record_of(schemas: Sequence[PointSchema], coding: Coding = RAW) -> RecordShape:
    """Return the layout of a token's record of these points."""
    return ENCODINGS[coding.encoding].record(schemas, coding)


def codec_of(name: str, k: int | None = None, seed: int | None = None) -> Coding:
    """Return a codec by its public name, with its parameters.

    Args:
        name: name of the codec.
        k: numbers stored per row; None for the codec's default.
        seed: seed of its matrix; None for 0.

    Raises:
        UnknownName: there is no such codec; the message lists the known ones.
        InvalidSpec: the codec has no such parameter.
    """
    codecs = {known: encoding for known, encoding in ENCODINGS.items() if encoding.is_codec}
    if name not in codecs:
        raise UnknownName(f"unknown codec {name!r}; {choices(name, codecs)}")
    parameters = (
        ("k", k, [known for known, codec in codecs.items() if codec.default_k]),
        ("seed", seed, [known for known, codec in codecs.items() if codec.seeded]),
    )
    for parameter, value, having in parameters:
        if value is not None and name not in having:
            raise InvalidSpec(
                f"{parameter}={value} with codec={name!r}, which has no such parameter; {', '.join(having)} have it"
            )
    return Coding(name, codecs[name].default_k if k is None else k, seed or 0)
