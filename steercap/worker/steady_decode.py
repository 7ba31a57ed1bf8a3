"""Series of decoding passes: one token for each of the same requests, only positions and lines change.

Almost every pass belongs to one: its step follows from the last one's in a few additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steercap.core.rows import Ints
from steercap.worker.batch import BatchRows
from steercap.worker.step import Step


@dataclass
class SteadyDecode:
    """State that the passes of a series share, and its progress.

    Args:
        tracked: places in the batch of the tracked requests, int64 [requests tracked].
        starts: positions of the next pass, int64 [requests tracked].
        left: number of passes that still belong to the series.
        step: step of the last pass.
        record_lines: lines that each token's record advances per pass, int64 [tracked tokens].
    """

    tracked: Ints
    starts: Ints
    left: int
    step: Step
    record_lines: Ints

    def next(self, batch: BatchRows) -> Step | None:
        """Return the step of the next pass over the same requests in the same order; None if the series ends."""
        if self.left < 1 or not (batch.counts == 1).all():
            return None
        if not np.array_equal(batch.starts[self.tracked], self.starts):
            return None
        self.left -= 1
        self.starts = self.starts + 1
        self.step = self.step.following(self.record_lines)
        return self.step
