"""HOW: one file per operation, lowering to rank-one edits. To add one, add a file whose `MEMBER` is its class."""

import sys

from steercap.core.registry import Registry

#: Every operation by the name of its file; members are subclasses of `steercap.steering.edits.base.Edit`.
EDITS: Registry[type] = Registry("edit", sys.modules[__name__], type)
