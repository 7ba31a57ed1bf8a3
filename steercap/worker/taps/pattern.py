"""Table that tells the taps what to do with each token of a pass, computed once for all steps of a series."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steercap.core.program import NONE
from steercap.core.rows import Ints
from steercap.kernels.bits import REPORT
from steercap.worker.step import Step


@dataclass
class Pattern:
    """Tables shared by all steps of a series; only the lines of rows differ.

    Args:
        series: identity of the series.
        table: instructions for each token of the pass, LINE still NONE: int32 [tokens, columns].
        places: places of the tracked tokens in it: int64 [tracked], or a slice of all.
        records: first line of each raw record, relative to that of the first: int64 [tracked].
        kept: True for the tracked tokens that are kept: bool [tracked]; None if all are.
        encoded: True where the record is stored in another form than it is computed in: bool [tracked].
        drains, encodes: True if any record goes to the arena, and if any of those is encoded.
        raw_lines: total lines of the raw records.
        lines: total lines of the raw and the encoded records.
    """

    series: object
    table: npt.NDArray[np.int32]
    places: Ints | slice
    records: Ints
    kept: npt.NDArray[np.bool_] | None
    encoded: npt.NDArray[np.bool_]
    drains: bool
    encodes: bool
    raw_lines: int
    lines: int

    @staticmethod
    def of(step: Step, num_tokens: int) -> Pattern:
        """Create the pattern of a step among `num_tokens` tokens, padding not counted."""
        raw, encoded = step.raw_lines, step.encoded
        table = step.asked.T.astype(np.int32, order="C")
        places: Ints | slice = slice(num_tokens)
        table[:, REPORT] = np.arange(len(step))
        if len(step) < num_tokens:
            asked, places = table, step.tokens
            table = np.full((num_tokens, asked.shape[1]), NONE, dtype=np.int32)
            table[places] = asked
        ends = raw.cumsum()
        total = lines = int(ends[-1])
        if encodes := bool(encoded.any()):
            lines += int(step.strides[encoded != 0].sum())
        kept, drains = None if raw.all() else raw != 0, bool(step.strides.any())
        return Pattern(step.series, table, places, ends - raw, kept, encoded != 0, drains, encodes, total, lines)

    def sources(self, line: int) -> Ints:
        """Return the first line of each raw record, NONE for none, given the line of the first: int64 [tracked]."""
        sources = self.records + line
        return sources if self.kept is None else np.where(self.kept, sources, NONE)

    def targets(self, line: int, strides: Ints) -> Ints:
        """Return the first line of each encoded record: int64 [encoded].

        Args:
            line: line of the first raw record.
            strides: lines of each stored record: int64 [tracked].
        """
        stored = strides[self.encoded]
        targets: Ints = line + self.raw_lines + np.cumsum(stored) - stored
        return targets
