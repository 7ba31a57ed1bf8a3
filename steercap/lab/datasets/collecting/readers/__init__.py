"""Registry of corpus readers, one file per file format. To add one, add a file with a `MEMBER`."""

import sys

from steercap.core.registry import Registry
from steercap.lab.datasets.collecting.readers.base import Reader

READERS: Registry[Reader] = Registry("format", sys.modules[__name__], Reader)
