"""Progress of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Progress:
    """Progress report of a run.

    Args:
        stage: "generate", "score", "filter", "capture", "vectors" or "report".
        done, total: number of requests, answers or traits, finished and in all.
    """

    stage: str
    done: int
    total: int


#: Receiver of reports; called in the event loop, so it should be quick.
Report: TypeAlias = Callable[[Progress], None]


class Count:
    """Counter of a stage's finished work, which reports it."""

    def __init__(self, stage: str, total: int, done: int, report: Report | None) -> None:
        self._stage, self._total, self._done, self._report = stage, total, done, report
        self.add(0)

    def add(self, count: int = 1) -> None:
        """Add to the finished work and report it."""
        self._done += count
        if self._report is not None:
            self._report(Progress(self._stage, self._done, self._total))
