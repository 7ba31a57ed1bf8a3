"""The order of the tests, and their division among processes: by files, as these share engines, the longest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling

#: A file whose every test starts an engine of its own, so that each is a unit.
APART: Final = "tests/test_notebooks.py"


class _Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return nodeid if file == APART else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling | None:
    """Replace the scheduler of `--dist=loadfile`."""
    return _Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests with the files that are allowed the most time first, and of others those with the most tests.

    A run ends with many short units, so that no process waits long for the last one of another.
    """
    allowed: dict[str, float] = {}
    tests: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("timeout")
        file = str(item.path)
        allowed[file] = max(allowed.get(file, 0.0), float(mark.args[0]) if mark else 0.0)
        tests[file] += 1
    return sorted(items, key=lambda item: (-allowed[str(item.path)], -tests[str(item.path)]))
