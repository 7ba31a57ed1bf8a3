"""Passes on a CUDA device, and the tables shared by the passes of a series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.program import NONE
from steercap.core.rows import Ints
from steercap.kernels.bits import REPORT
from steercap.worker.arena import RecordLayout
from steercap.worker.step import Step


@dataclass
class Pattern:
    """Tables shared by all steps of a series; only the ring lines of the rows differ.

    Args:
        series: identity of the series.
        table: instructions for each token of the pass, LINE still NONE: int32 [tokens, columns].
        places: indices of the tracked tokens in `table`: int64 [tracked], or a slice of all.
        records: first line of each raw record, relative to the first one's, NONE if none is captured: int64 [tracked].
        kept: True for the tracked tokens that are captured: bool [tracked]; None if all are.
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
        """Create the pattern of a step in a batch of `num_tokens` tokens, padding not counted."""
        raw, encoded = step.raw_lines, step.encoded
        table = step.device_columns.T.astype(np.int32, order="C")
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
        records = ends - raw if total else np.full(len(step), NONE, dtype=np.int64)
        return Pattern(step.series, table, places, records, kept, encoded != 0, drains, encodes, total, lines)

    def sources(self, line: int | Ints) -> Ints:
        """Return the ring line of each token's raw record, NONE for none: int64 [tracked], or [passes, tracked].

        Args:
            line: ring line of the first raw record, or of that of several passes, int64 [passes, 1].
        """
        if not self.raw_lines:
            return self.records
        sources = self.records + line
        return sources if self.kept is None else np.where(self.kept, sources, NONE)

    def targets(self, line: int, strides: Ints) -> Ints:
        """Return the ring line of each encoded record, behind the raw records: int64 [encoded].

        Args:
            line: line of the first raw record.
            strides: lines of each stored record: int64 [tracked].
        """
        stored = strides[self.encoded]
        targets: Ints = line + self.raw_lines + np.cumsum(stored) - stored
        return targets


@dataclass(eq=False)
class Pass:
    """State of one pass, from the time its tables are filled until it is completed.

    Args:
        step: work for the tracked tokens of the pass.
        pattern: tables of the pass's taps.
        token_ids, positions: the model's inputs, on the device.
        number: index of the pass's reports and buffers, among those of AHEAD passes.
        line: ring line of the first row of the pass.
        sources: ring line of the record to copy for each tracked token, NONE if it is not captured: int64 [tracked];
            None until it is computed.
        updates: number of requests whose accumulators the pass updates.
        encoded: layouts with an encoding, and the slice of the encoder's upload with the records of each.
        prompts: True if a request computes more than one token and its drafts, so that the pass is no single graph.
        large: the `LargePass`, if rows leave the ring while the pass runs; else None.
        failure: reason why the pass cannot be trusted, or None.
        closed: CUDA event at the end of the pass.
        copied: CUDA event after the last copy of the pass's rows to the host; None until all copies are queued.
    """

    step: Step
    pattern: Pattern
    token_ids: torch.Tensor
    positions: torch.Tensor
    number: int
    line: int
    sources: Ints | None = None
    updates: int = 0
    encoded: Sequence[tuple[RecordLayout, slice]] = ()
    prompts: bool = False
    large: Any = None
    failure: str | None = None
    closed: Any = None
    copied: Any = None


@dataclass
class Bundle:
    """Rows of closed passes that are copied to the host together.

    Args:
        passes: the passes, in their order.
        copies: target addresses, source addresses, and sizes in bytes of the copies: int64 [copies] each.
        queued: number of these copies that are queued.
    """

    passes: Sequence[Pass]
    copies: tuple[Ints, Ints, Ints]
    queued: int = 0
