"""Registry of training objectives, one file each. To add one, add a file whose `MEMBER` is an `Objective`."""

import sys

from steercap.core.registry import Registry
from steercap.lab.training.objectives.base import Objective

#: Every objective, with its defaults, by the name of its file.
OBJECTIVES: Registry[Objective] = Registry("objective", sys.modules[__name__], Objective)
