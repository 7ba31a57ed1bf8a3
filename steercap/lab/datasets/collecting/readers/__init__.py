"""CORPORA: one file per kind of file that documents are read from. To add one, add a file with a `MEMBER`."""

import sys

from steercap.core.registry import Registry
from steercap.lab.datasets.collecting.readers.base import Reader

READERS: Registry[Reader] = Registry("format", sys.modules[__name__], Reader)  # type: ignore[type-abstract]
