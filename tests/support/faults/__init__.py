"""Faults that are injected for real, and what must come of each: one a file, found by `FAULTS`.

`python -m support.faults NAME` injects one, in this process and those that it starts; `scripts/faults.py` does
so with all of them, each in a process of its own, and writes the table of docs/faults.md.
"""

from __future__ import annotations

import sys
from typing import Final

from steercap.core.registry import Registry
from support.faults.base import Fault, Outcome

__all__ = ["FAULTS", "Fault", "Outcome"]

FAULTS: Final[Registry[Fault]] = Registry("fault", sys.modules[__name__], Fault)
