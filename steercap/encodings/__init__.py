"""AS: one file a codec. To add one, add a file with a `MEMBER`."""

import sys

from steercap.core.registry import Registry
from steercap.encodings.base import Encoding

ENCODINGS: Registry[Encoding] = Registry("codec", sys.modules[__name__], Encoding)  # type: ignore[type-abstract]
