"""Registry of edits: one file per operation, each lowered to rank-one edits. A new file needs its class as `MEMBER`."""

import sys

from steercap.core.registry import Registry

#: Every operation by the name of its file; members are subclasses of `steercap.steering.edits.base.Edit`.
EDITS: Registry[type] = Registry("edit", sys.modules[__name__], type)
