"""Injects one fault, and says as JSON what came of it: `python -m support.faults NAME FOLDER`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from support.faults import FAULTS


def main() -> None:
    """See above."""
    found = asyncio.run(FAULTS[sys.argv[1]].inject(Path(sys.argv[2])))
    print(json.dumps([dataclasses.asdict(one) for one in found]))


if __name__ == "__main__":
    main()
