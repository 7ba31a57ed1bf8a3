"""AS: one file per encoding of rows. To add one, add a file with a `MEMBER`."""

import sys

from steercap.core.registry import Registry
from steercap.encodings.base import Encoding
from steercap.errors import UnknownName

ENCODINGS: Registry[Encoding] = Registry("encoding", sys.modules[__name__], Encoding)  # type: ignore[type-abstract]


def check_codec(name: str) -> None:
    """Check that rows can be stored so.

    Raises:
        UnknownName: they cannot; the message lists how they can.
    """
    codecs = [known for known, encoding in ENCODINGS.items() if encoding.is_codec]
    if name not in codecs:
        raise UnknownName(f"unknown codec {name!r}; known: {', '.join(map(repr, codecs))}")
