"""How far a run is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Progress:
    """What is reported while a run goes on.

    Args:
        stage: "generate", "score", "filter", "capture", "vectors" or "report".
        done, total: of its requests, answers or traits.
    """

    stage: str
    done: int
    total: int


#: What takes reports; called in the event loop, so it should be quick.
Report: TypeAlias = Callable[[Progress], None]


class Count:
    """Counts what a stage has done, and reports it."""

    def __init__(self, stage: str, total: int, done: int, report: Report | None) -> None:
        self._stage, self._total, self._done, self._report = stage, total, done, report
        self.add(0)

    def add(self, count: int = 1) -> None:
        """So many more are done."""
        self._done += count
        if self._report is not None:
            self._report(Progress(self._stage, self._done, self._total))
