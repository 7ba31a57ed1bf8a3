"""AS: one file a codec. To add one, add a file with a `MEMBER`."""

import sys

from steercap.codecs.base import Codec
from steercap.core.registry import Registry

CODECS: Registry[Codec] = Registry("codec", sys.modules[__name__], Codec)  # type: ignore[type-abstract]
