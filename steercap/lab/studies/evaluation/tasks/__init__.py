"""Registry of tasks of fixed texts, one file each. To add one, add a file whose `MEMBER` is its class."""

import sys

from steercap.core.registry import Registry
from steercap.lab.studies.evaluation.tasks.base import Task

#: Every task by the name of its file; members are subclasses of `Task`.
TASKS: Registry[type[Task]] = Registry("task", sys.modules[__name__], type)
