"""What tests and scripts show of an engine, with references of their own: rows, edits, SAEs, faults, kills, soaks.

It is no part of the wheel. The processes that it starts find it, too.
"""

import os
from pathlib import Path

_TESTS = str(Path(__file__).parent.parent)
_PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if _TESTS not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, _TESTS])
