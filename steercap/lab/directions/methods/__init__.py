"""Registry of methods that compute a direction from two kinds of rows. To add one, add a file with a `MEMBER`."""

import sys

from steercap.core.registry import Registry
from steercap.lab.directions.methods.base import Method

METHODS: Registry[Method] = Registry("method", sys.modules[__name__], Method)
