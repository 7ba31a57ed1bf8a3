"""Puts tests/ on the path of a script that takes `support` from there: import it before."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
