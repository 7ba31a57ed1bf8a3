"""Table that tells the taps what to do with each token of a pass, computed once for all steps of a series."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steercap.core.program import NONE
from steercap.core.rows import Ints
from steercap.kernels import triton_tap as kernel
from steercap.worker.layouts import Layouts
from steercap.worker.step import Step


@dataclass(frozen=True)
class Pattern:
    """Tables shared by all steps of a series; only the lines of rows differ.

    Args:
        series: identity of the series.
        table: instructions for each token of the pass, LINE still NONE: int32 [tokens, columns].
        kept: True for the tracked tokens that are kept: bool [tracked].
        records: first line of each raw record, relative to that of the first: int64 [tracked].
        stored: lines of each stored record: int64 [tracked].
        encoded: True where that is stored in another form than it is computed in: bool [tracked].
        drained: True where it goes to the arena: bool [tracked].
        drains, encodes: True if any does, and if any of those is encoded.
        raw_lines: total lines of the raw records.
        lines: total lines of the raw and the encoded records.
    """

    series: object
    table: npt.NDArray[np.int32]
    kept: npt.NDArray[np.bool_]
    records: Ints
    stored: Ints
    encoded: npt.NDArray[np.bool_]
    drained: npt.NDArray[np.bool_]
    drains: bool
    encodes: bool
    raw_lines: int
    lines: int

    @staticmethod
    def of(step: Step, num_tokens: int, layouts: Layouts) -> Pattern:
        """Create the pattern of a step among `num_tokens` tokens, padding not counted."""
        kept, changed, drained = step.kept, step.changed, step.drained
        raw, stored = layouts.raw_lines[step.layouts], layouts.lines[step.layouts]
        encoded = layouts.encoded[step.layouts] & drained
        asked = np.full((len(step), kernel.TOKEN_COLUMNS), NONE, dtype=np.int32)
        asked[changed, kernel.SLOT] = step.slots[changed]
        asked[changed, kernel.MASK] = step.masks[changed]
        asked[kept, kernel.LAYOUT] = step.layouts[kept]
        asked[kept, kernel.BEFORE] = layouts.before[step.layouts[kept]]
        asked[:, kernel.REPORT] = np.arange(len(step))
        table = np.full((num_tokens, kernel.TOKEN_COLUMNS), NONE, dtype=np.int32)
        table[step.tokens] = asked
        total = int(raw.sum())
        lines = total + int(stored[encoded].sum())
        kinds = encoded, drained, bool(drained.any()), bool(encoded.any())
        return Pattern(step.series, table, kept, np.cumsum(raw) - raw, stored, *kinds, total, lines)

    def sources(self, line: int) -> Ints:
        """Return the first line of each raw record, NONE for none, given the line of the first: int64 [tracked]."""
        return np.where(self.kept, self.records + line, NONE)

    def targets(self, line: int) -> Ints:
        """Return the first line of each encoded record, given the line of the first raw one: int64 [encoded]."""
        stored = self.stored[self.encoded]
        targets: Ints = line + self.raw_lines + np.cumsum(stored) - stored
        return targets
