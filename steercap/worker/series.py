"""Passes of one token for each of the same requests, in which nothing changes but positions and lines.

Almost every pass is one: its step follows from the last one's in a few additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steercap.core.rows import Ints
from steercap.worker.batch import BatchRows
from steercap.worker.step import Step


@dataclass
class Series:
    """What the passes of a series have in common, and how far it is.

    Args:
        tracked: which requests of the batch are tracked, int64 [requests tracked].
        starts: positions of the next pass, int64 [requests tracked].
        left: passes that are still alike.
        step: the last one's.
        record_lines: what the next one adds to its lines, int64 [tracked tokens].
    """

    tracked: Ints
    starts: Ints
    left: int
    step: Step
    record_lines: Ints

    def next(self, batch: BatchRows) -> Step | None:
        """The step of the next pass, over the same requests in the same order; None if it goes on otherwise."""
        if self.left < 1 or not (batch.counts == 1).all():
            return None
        if not np.array_equal(batch.starts[self.tracked], self.starts):
            return None
        self.left -= 1
        self.starts = self.starts + 1
        self.step = self.step.following(self.record_lines)
        return self.step
