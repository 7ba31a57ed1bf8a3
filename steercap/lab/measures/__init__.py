"""Registry of measures of answers, one file each. To add one, add a file whose `MEMBER` is its class."""

import sys

from steercap.core.registry import Registry

#: Every measure by the name of its file; members are subclasses of `Measure`.
MEASURES: Registry[type] = Registry("measure", sys.modules[__name__], type)
