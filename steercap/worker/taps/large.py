"""Passes with more rows than the ring should hold: rows leave it layer by layer while the pass runs.

Such a pass runs no CUDA graph, so each tap is launched from Python. The rows of a few layers at a time have a part of
the ring: before the first tap of the next layers the part is encoded, reduced and copied to the host, and every token's
line is rewritten. The model's stream waits for a copy only when the ring is full.

A token's line is where its record would begin if the part held all of its points, so that offsets within a record
stay the same; the ring has a head of unused lines for that. Until the first tap runs, and once a tap runs out of order
or does not identify its point, no token has a line: its rows are missed and its requests fail.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from steercap.core.program import NONE
from steercap.core.rows import Ints
from steercap.core.schema import LINE_BYTES
from steercap.kernels.bits import LINE
from steercap.worker.accumulators import Updates
from steercap.worker.arena import Layouts, RecordLayout
from steercap.worker.step import Step
from steercap.worker.taps.cuda_rows import DeviceAccumulators, DeviceEncoder, grids
from steercap.worker.taps.passes import Pattern
from steercap.worker.taps.transfers import Ring, Transfers


@dataclass(frozen=True)
class RowMemory:
    """Rows on the device, and the objects that encode, reduce and copy them.

    Args:
        rows: the ring's lines, behind `head` unused ones: uint8 [lines, LINE_BYTES].
        head: number of unused lines.
        ring: allocator of the ring's lines.
        tokens: table of the pass's tokens, on the device.
        idle: memory for a kernel that only separates two taps: int32 [1].
        encoder, sums: encoder of records, and running reductions.
        transfers: copies between host and device.
        wait: function that makes the model's stream wait for a holder of lines in the ring.
    """

    rows: torch.Tensor
    head: int
    ring: Ring[Any]
    tokens: torch.Tensor
    idle: torch.Tensor
    encoder: DeviceEncoder
    sums: DeviceAccumulators
    transfers: Transfers
    wait: Callable[[Any], None]


@dataclass(eq=False)
class LayerRows:
    """Rows of the consecutive layers whose taps are running; arrays are per captured token: int64 [kept].

    Args:
        points: indices of the layers' points on this rank.
        line, lines: first line in the ring, and number of lines.
        records: line at which the token's raw record would begin.
        sources: line at which the record that is copied to the arena, raw or encoded, would begin.
        raw: number of lines of this part of a raw record.
        steps: number of lines of this part of the copied record.
        begins, sizes: first byte of this part in a stored record, and number of bytes.
        copied: event after the copies of this part.
    """

    points: range
    line: int
    lines: int
    records: Ints
    sources: Ints
    raw: Ints
    steps: Ints
    begins: Ints
    sizes: Ints
    copied: Any = None


class LargePass:
    """Pass whose rows leave the ring in parts of a few layers.

    Args:
        memory: device memory of the rows, and the objects that work on it.
        step, pattern, updates: work of the pass, its tables, and the updates of running reductions, None for none.
        layouts: record layouts of this rank.
        layers: first point of each layer on this rank, then the number of points.
        most: maximum lines of a part of more than one layer.
        arena: memory that rows are copied to, uint8 [lines, LINE_BYTES]; None if there is none yet.
    """

    def __init__(  # noqa: PLR0917 -- a pass, and where it runs
        self,
        memory: RowMemory,
        step: Step,
        pattern: Pattern,
        updates: Updates | None,
        layouts: Layouts,
        layers: Sequence[int],
        most: int,
        arena: torch.Tensor | None,
    ) -> None:
        self._arena = arena
        self._memory, self._step, self._pattern, self._updates = memory, step, pattern, updates
        self._kept: Final = np.flatnonzero(step.kept)
        numbers, self._of = np.unique(step.layouts[self._kept], return_inverse=True)
        self._layouts = [layouts[number] for number in numbers.tolist()]
        self._encoded, self._drained = pattern.encoded[self._kept], step.drained[self._kept]
        self._left = deque(self._parts(layers, most))
        self._now: LayerRows | None = None
        self._stream = memory.transfers.current()
        self._beside: dict[Any, None] = {}  # other streams with taps of this part
        #: Greatest number of lines of a part.
        self.lines = max((self._lines(points) for points in self._left), default=0)
        #: Parts with rows for the arena, in their order.
        self.leaving: list[LayerRows] = []
        #: True once a tap ran out of order, or did not identify its point.
        self.lost = False

    def _parts(self, layers: Sequence[int], most: int) -> Iterator[range]:
        """Yield the points of each part: as many whole layers as fit in `most` lines, one at least."""
        first = 0
        for stop, after in pairwise(layers[1:]):
            if self._lines(range(first, after)) > most:
                yield range(first, stop)
                first = stop
        yield range(first, layers[-1])

    def _lines(self, points: range) -> int:
        """Return the number of lines that the pass's rows need at these points, raw and encoded."""
        total = 0
        counts = np.bincount(self._of, minlength=len(self._layouts))
        coded = np.bincount(self._of[self._encoded], minlength=len(self._layouts))
        for layout, all_, some in zip(self._layouts, counts.tolist(), coded.tolist(), strict=True):
            _, raw, begin, size = _extent(layout, points)
            total += all_ * raw + some * _lines_of(begin, size)
        return total

    def before(self, point: int) -> None:
        """Make room for the rows of a point, by its index on this rank (NONE if unknown), whose tap is launched next.

        A tap on another CUDA stream than the model's, as in shared experts, waits for the model's stream, and the next
        part waits for the tap.
        """
        transfers, here = self._memory.transfers, self._memory.transfers.current()
        if here == self._stream:
            self._make_room(point)
            return
        with transfers.using(self._stream):
            self._make_room(point)
            ready = transfers.now()
        transfers.hold(ready)
        self._memory.idle.zero_()  # as in `_write`
        self._beside[here] = None

    def _make_room(self, point: int) -> None:
        if self.lost or (self._now is not None and point in self._now.points):
            return
        if point < (0 if self._now is None else self._now.points.start):
            self.leave()  # a request may have all that it asked for
            self.lost = True
            self._write(np.full(len(self._kept), NONE, dtype=np.int64))
            return
        while self._now is None or point not in self._now.points:
            self.leave()
            self._enter(self._left.popleft())

    def _enter(self, points: range) -> None:
        """Reserve a part of the ring for the rows of these points, and write every token's line."""
        extents = np.array([_extent(layout, points) for layout in self._layouts], dtype=np.int64)
        first, raw, begins, sizes = extents[self._of].T
        coded = np.where(self._encoded, _lines_of(begins, sizes), 0)
        total, lines = int(raw.sum()), int(raw.sum() + coded.sum())
        line, busy = self._memory.ring.reserve(lines)
        for holder in busy:
            self._memory.wait(holder)
        start = line + self._memory.head
        records = start + np.cumsum(raw) - raw - first
        ends = start + total + np.cumsum(coded) - coded - begins // LINE_BYTES
        sources, steps = np.where(self._encoded, ends, records), np.where(self._encoded, coded, raw)
        self._now = LayerRows(points, line, lines, records, sources, raw, steps, begins, sizes)
        self._write(records)

    def _write(self, records: Ints) -> None:
        """Write the line of each captured token's record, int64 [kept], to the device's table."""
        count = len(self._pattern.table)
        column = np.full(count, NONE, dtype=np.int32)
        column[self._step.tokens[self._kept]] = records
        self._memory.tokens[:count, LINE] = self._memory.transfers.to_device(torch.from_numpy(column))
        # The next tap may read its tables while the kernel before it runs, so that must be another one.
        self._memory.idle.zero_()

    def leave(self) -> None:
        """Encode, reduce and copy to the host the rows of the part whose taps have run."""
        part, self._now, memory = self._now, None, self._memory
        while self._beside:
            with memory.transfers.using(self._beside.popitem()[0]):
                ran = memory.transfers.now()
            memory.transfers.hold(ran)
        if part is None:
            return
        if self._updates is not None:
            whole = np.full((2, len(self._step)), NONE, dtype=np.int64)
            whole[:, self._kept] = part.records, part.raw
            memory.sums.update(memory.rows, self._step, self._updates, whole[0], whole[1], part.points)
        for number, layout in enumerate(self._layouts):
            own = self._encoded & (self._of == number)
            if own.any():
                records = np.stack([part.records[own], part.sources[own]], axis=1)
                memory.encoder.encode(memory.rows, layout, records, part.points)
        if self._arena is not None:
            self._copy(part, self._arena)

    def _copy(self, part: LayerRows, arena: torch.Tensor) -> None:
        """Queue the copies of a part to the arena, and keep its ring lines reserved until they are made."""
        own = self._drained & (part.sizes > 0)
        if not own.any():
            return
        to, begins = self._step.lines[self._kept][own] * LINE_BYTES, part.begins[own]
        ahead = np.array([layout.stored.lines for layout in self._layouts], dtype=np.int64)[self._of[own]]
        copies = grids(
            arena.data_ptr() + to + begins,
            self._memory.rows.data_ptr() + part.sources[own] * LINE_BYTES + begins,
            part.sizes[own],
            ahead * LINE_BYTES,
            part.steps[own] * LINE_BYTES,
        )
        part.copied = self._memory.transfers.fetch_grids(self._memory.transfers.now(), copies)
        self._memory.ring.hold(part.line, part.lines, part)
        self.leaving.append(part)


def _extent(layout: RecordLayout, points: range) -> tuple[int, int, int, int]:
    """Return where the rows of consecutive points (indices on this rank) lie in a record.

    Returns:
        First line and number of lines in the raw record; first byte and number of bytes in the stored one.
    """
    first, stop = bisect_left(layout.locals, points.start), bisect_left(layout.locals, points.stop)
    if first == stop:
        return 0, 0, 0, 0
    raw, stored = (
        (shape.offsets[first], shape.lines * LINE_BYTES if stop == len(layout.locals) else shape.offsets[stop])
        for shape in (layout.raw, layout.stored)
    )
    return raw[0] // LINE_BYTES, (raw[1] - raw[0]) // LINE_BYTES, stored[0], stored[1] - stored[0]


def _lines_of(begins: Any, sizes: Any) -> Any:
    """Return the number of lines that `sizes` bytes of a record, from byte `begins` on, touch: numbers or arrays."""
    return -(-(begins + sizes) // LINE_BYTES) - begins // LINE_BYTES
