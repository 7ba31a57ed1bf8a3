"""Registry of sketches, statistics of rows that are not kept. To add a kind, add a file with a `MEMBER`."""

import sys

from steercap.core.registry import Registry
from steercap.worker.sketches.base import Kind

SKETCHES: Registry[Kind] = Registry("sketch", sys.modules[__name__], Kind)
