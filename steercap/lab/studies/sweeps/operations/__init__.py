"""Registry of operations that a sweep can scale, one file each. To add one, add a file with a `MEMBER`."""

import sys

from steercap.core.registry import Registry
from steercap.lab.studies.sweeps.operations.base import Operation

OPERATIONS: Registry[Operation] = Registry("operation", sys.modules[__name__], Operation)
