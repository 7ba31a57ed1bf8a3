"""AS: one file per encoding of rows. To add one, add a file with a `MEMBER`."""

import sys
from typing import Final

from steercap.core.registry import Registry
from steercap.encodings.base import Encoding
from steercap.errors import UnknownName

ENCODINGS: Registry[Encoding] = Registry("codec", sys.modules[__name__], Encoding)  # type: ignore[type-abstract]
#: Those that `CaptureSpec(codec=)` may name; the others follow from `reduce=` and `project=`.
CODECS: Final = ("full8", "raw")


def check_codec(name: str) -> None:
    """Check that rows can be stored so.

    Raises:
        UnknownName: they cannot; the message lists how they can.
    """
    if name not in CODECS:
        raise UnknownName(f"unknown codec {name!r}; known: {', '.join(map(repr, CODECS))}")
