"""What the taps are told of the tokens of a pass, but for where rows go: worked out once for all steps of a series."""

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
    """The same for all steps of a series.

    Args:
        series: whose.
        table: what each token of the pass is to have, LINE still NONE: int32 [tokens, columns].
        kept: which of the tracked tokens are kept: bool [tracked].
        records: the first line of each of their records, from the first of all: int64 [tracked].
        stored: lines of each record as it is stored: int64 [tracked].
        encoded: whether that is another form than it is computed in: bool [tracked].
        drained: whether it goes to the arena: bool [tracked].
        raw_lines: lines of all records as they are computed.
        lines: these, and those of what is stored in another form.
    """

    series: object
    table: npt.NDArray[np.int32]
    kept: npt.NDArray[np.bool_]
    records: Ints
    stored: Ints
    encoded: npt.NDArray[np.bool_]
    drained: npt.NDArray[np.bool_]
    raw_lines: int
    lines: int

    @staticmethod
    def of(step: Step, num_tokens: int, layouts: Layouts) -> Pattern:
        """Of a step among `num_tokens` tokens, padding not counted."""
        kept, changed, drained = step.kept, step.changed, step.drained
        raw, stored = layouts.raw_lines[step.layouts], layouts.lines[step.layouts]
        encoded = layouts.encoded[step.layouts] & drained
        asked = np.full((len(step), kernel.TOKEN_COLUMNS), NONE, dtype=np.int32)
        asked[changed, kernel.SLOT] = step.slots[changed]
        asked[changed, kernel.MASK] = step.masks[changed]
        asked[kept, kernel.LAYOUT] = step.layouts[kept]
        asked[kept, kernel.BEFORE] = layouts.before[step.layouts[kept]]
        asked[:, kernel.WITNESS] = np.arange(len(step))
        table = np.full((num_tokens, kernel.TOKEN_COLUMNS), NONE, dtype=np.int32)
        table[step.tokens] = asked
        total = int(raw.sum())
        lines = total + int(stored[encoded].sum())
        return Pattern(step.series, table, kept, np.cumsum(raw) - raw, stored, encoded, drained, total, lines)

    def sources(self, line: int) -> Ints:
        """The first line of each record, NONE for none, if the first of all lies at `line`: int64 [tracked]."""
        return np.where(self.kept, self.records + line, NONE)

    def targets(self, line: int) -> Ints:
        """The first line of what is stored in another form, likewise: int64 [encoded]."""
        stored = self.stored[self.encoded]
        targets: Ints = line + self.raw_lines + np.cumsum(stored) - stored
        return targets
