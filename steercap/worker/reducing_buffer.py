"""Capture buffer of a request whose rows are reduced while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from steercap.core.messages import Owner
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import NONE
from steercap.core.rows import Ints, rows_selected
from steercap.core.schema import REDUCED
from steercap.core.spec import Reduction
from steercap.kernels.codecs import ENCODINGS
from steercap.kernels.codecs.floats import accumulator_records
from steercap.worker.accumulators import EMPTY
from steercap.worker.arena import Arena, Layouts, RecordLayout
from steercap.worker.capture_buffer import CaptureBuffer
from steercap.worker.reduce import Accumulator, rows_of, write_reduced
from steercap.worker.taps import Taps


class ReducingBuffer(CaptureBuffer):
    """Capture buffer whose rows are reduced as they come; only the reduction reaches the arena, at the request's end.

    Args:
        owner, plan, capture, layouts, arena: as for `CaptureBuffer`.
        taps: taps of this rank, which hold the accumulators and add the rows.
    """

    def __init__(  # noqa: PLR0917 -- as for `CaptureBuffer`
        self, owner: Owner, plan: Plan, capture: CapturePlan, layouts: Layouts, arena: Arena, taps: Taps
    ) -> None:
        super().__init__(owner, plan, capture, layouts, arena)
        assert capture.reduce is not None
        self._taps = taps
        self._accumulator = taps.accumulators.acquire(capture.reduce, plan.prompt_len) if self._layout else None
        self._spilled: tuple[int, Ints] | None = None  # rows added, and positions of those held back
        self._copied: Any = None
        if self._layout and self._accumulator is None:
            self.fail(
                f"{taps.accumulators.total} reductions run at once, which is the maximum; raise SteerModel(..., "
                "reduce_bytes=)"
            )

    @property
    def accumulator(self) -> int:
        return NONE if self._accumulator is None else self._accumulator

    def _take(self, rows: Ints) -> Ints | None:
        return np.full_like(rows, NONE) if self._reach(self._most) else None

    def _take_ahead(self, start: int, end: int, shift: int) -> tuple[int, int | None]:  # noqa: ARG002 -- rows have no line
        return (end, 0) if self._reach(self._most) else (start, None)

    def reads(self, total: int) -> int:  # noqa: ARG002 -- whatever was added must have been
        return self.limit

    def _stopped(self) -> None:
        if not self.writes:
            self._keep(0)
        if self._accumulator is not None:
            self._taps.accumulators.end(self._accumulator, self._spill)

    def free(self) -> None:
        self._release()
        super().free()

    def _release(self) -> tuple[int, Ints]:
        """Release the accumulator; return the number of rows added, and each slot's held position: int64 [held]."""
        self.stop()
        accumulator, self._accumulator = self._accumulator, None
        return (0, np.empty(0, dtype=np.int64)) if accumulator is None else self._taps.accumulators.release(accumulator)

    def _spill(self) -> None:
        """Move the accumulator and its held rows to the arena, because another request needs the accumulator."""
        assert self._accumulator is not None
        if len(self._places.pages) and not self.failure:
            assert self._layout is not None
            self._copied = self._taps.spill(self._accumulator, self._layout, self._first_lines)
        self._spilled = self._release()

    @property
    def _first_lines(self) -> Ints:
        """First line of each record in the arena."""
        return self._places.lines(np.arange(self._most))

    def _record_lines(self) -> int:
        return 0 if self._layout is None else self._layout.raw.lines

    @property
    def _most(self) -> int:
        return accumulator_records(self._schemas, self._taps.accumulators.held)

    def _reduce(self, reduction: Reduction, rows: int, total: int) -> None:
        if self._spilled is None:  # `finish` handles the accumulators that are still in use
            self.fail("its reduction was never finished")
            return
        if self._copied is not None:
            self._taps.wait_for(self._copied)
        added, positions = self._spilled
        late = np.flatnonzero((positions != EMPTY) & (positions < total))
        late = late[np.argsort(positions[late])]
        if self._has(added + len(late), rows):
            assert self._layout is not None
            line = int(self._first_lines[0])
            reduced = self._reduced_rows(line)
            accumulators = [
                Accumulator(reduction, row.clone(), added) if added else Accumulator(reduction) for row in reduced
            ]
            held = len(self._first_lines) - self._taps.accumulators.held
            for first in self._first_lines[held + late].tolist():
                for accumulator, row in zip(accumulators, self._raw_rows(first), strict=True):
                    accumulator.add(row)
            write_reduced(self._arena, line, self._schemas, [one.result() for one in accumulators])
            self._keep(1)

    def _raw_rows(self, line: int) -> Iterator[torch.Tensor]:
        assert self._layout is not None
        return rows_of(self._arena.read(line, 1, self._record), self._layout, self._schemas)

    def _reduced_rows(self, line: int) -> list[torch.Tensor]:
        """Read the spilled reduction from its record at `line`: one float32 [shard width] tensor per point."""
        encoding = ENCODINGS["reduced"]
        shape = encoding.record(self._schemas, REDUCED)
        stored = self._arena.read(line, 1, shape.lines)
        return [
            encoding.decode(stored[:, offset : offset + size].contiguous(), schema, REDUCED).flatten()
            for schema, offset, size in zip(self._schemas, shape.offsets, shape.sizes, strict=True)
        ]

    def _has(self, found: int, rows: int) -> bool:
        """Return whether `found`, the number of reduced rows, equals `rows`, the expected one; if not, fail."""
        if found != rows:
            self.fail(f"{found} rows were reduced, but {rows} are selected")
        return found == rows

    def rows_to_finish(self, total: int) -> int:
        """Return the number of selected rows of a sequence of `total` inputs; 0 if there is no reduction to finish."""
        if self._accumulator is None or self.failure:
            return 0
        rows = len(rows_selected(self.capture.ranges, self.limit, total))
        return rows if self._missing(self._labels(rows)[0]) is None else 0

    def finished(self, rows: int, found: int) -> None:
        """Record that the reduction is in the arena; fail unless the number of reduced rows, `found`, equals `rows`."""
        if self._has(found, rows):
            self._reduced = self._labels(rows)
            self._release()
            self._keep(1)

    @property
    def target(self) -> tuple[int, RecordLayout]:
        """First line in the arena that the reduction is written to, and the layout of the raw rows."""
        assert self._layout is not None
        return int(self._first_lines[0]), self._layout


def finish(taps: Taps, asked: Mapping[CaptureBuffer, int]) -> None:
    """Finish the running reductions of requests together: copy them to the arena, and wait for the copies.

    What is raised in between fails them: their held rows may have been added, and must not be added again.

    Args:
        taps: taps that carry out the reductions.
        asked: number of inputs of the sequence, by the request's buffer; buffers without reduction are skipped.
    """
    running = [(box, total) for box, total in asked.items() if isinstance(box, ReducingBuffer)]
    ready = [(box, total, rows) for box, total in running if (rows := box.rows_to_finish(total))]
    if not ready:
        return
    accumulators, totals = np.array([(box.accumulator, total) for box, total, _ in ready]).T
    updates, found = taps.accumulators.finish(accumulators, totals)
    divisors = np.where([box.capture.reduce == "mean" for box, *_ in ready], found, 1)
    targets = [box.target for box, *_ in ready]
    lines = np.array([line for line, _ in targets])
    try:
        taps.wait_for(taps.finish(updates, divisors, [layout for _, layout in targets], lines))
    except Exception as error:
        for box, *_ in ready:
            box.fail(f"its reduction was interrupted: {error!r}")
        raise
    for (box, _, rows), added in zip(ready, found.tolist(), strict=True):
        box.finished(rows, added)
