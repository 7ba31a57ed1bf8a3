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


@dataclass
class Pattern:
    """Tables shared by all steps of a series; only the lines of rows differ.

    Args:
        series: identity of the series.
        table: instructions for each token of the pass, LINE still NONE: int32 [tokens, columns].
        places: places of the tracked tokens in it: int64 [tracked], or a slice of all.
        kept: True for the tracked tokens that are kept: bool [tracked].
        records: first line of each raw record, relative to that of the first: int64 [tracked].
        encoded: True where the record is stored in another form than it is computed in: bool [tracked].
        drained: True where it goes to the arena: bool [tracked].
        drains, encodes: True if any does, and if any of those is encoded.
        raw_lines: total lines of the raw records.
        lines: total lines of the raw and the encoded records.
    """

    series: object
    table: npt.NDArray[np.int32]
    places: Ints | slice
    kept: npt.NDArray[np.bool_]
    records: Ints
    encoded: npt.NDArray[np.bool_]
    drained: npt.NDArray[np.bool_]
    drains: bool
    encodes: bool
    raw_lines: int
    lines: int

    @staticmethod
    def of(step: Step, num_tokens: int, layouts: Layouts) -> Pattern:
        """Create the pattern of a step among `num_tokens` tokens, padding not counted."""
        drained, of = step.drained, step.layouts
        raw, encoded = layouts.raw_lines[of], layouts.encoded[of]
        asked = np.full((len(step), kernel.TOKEN_COLUMNS), NONE, dtype=np.int32)
        asked[:, kernel.SLOT] = step.slots
        asked[:, kernel.MASK] = step.masks
        asked[:, kernel.LAYOUT] = of
        asked[:, kernel.BEFORE] = layouts.before[of]
        asked[:, kernel.REPORT] = np.arange(len(step))
        table, places = asked, slice(num_tokens)
        if len(step) < num_tokens:
            table, places = np.full((num_tokens, kernel.TOKEN_COLUMNS), NONE, dtype=np.int32), step.tokens
            table[places] = asked
        ends = raw.cumsum()
        total = lines = int(ends[-1])
        if encodes := bool(encoded.any()):
            encoded &= drained
            lines += int(step.strides[encoded].sum())
        kinds = encoded, drained, bool(drained.any()), encodes
        return Pattern(step.series, table, places, step.kept, ends - raw, *kinds, total, lines)

    def sources(self, line: int) -> Ints:
        """Return the first line of each raw record, NONE for none, given the line of the first: int64 [tracked]."""
        return np.where(self.kept, self.records + line, NONE)

    def targets(self, line: int, strides: Ints) -> Ints:
        """Return the first line of each encoded record: int64 [encoded].

        Args:
            line: line of the first raw record.
            strides: lines of each stored record: int64 [tracked].
        """
        stored = strides[self.encoded]
        targets: Ints = line + self.raw_lines + np.cumsum(stored) - stored
        return targets
