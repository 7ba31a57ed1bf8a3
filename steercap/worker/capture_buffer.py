"""Storage of one request's captured rows in a worker, and the message that describes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.messages import CapturedRows, LineRange, Owner
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import NONE
from steercap.core.rows import Ints, RecordLines, ranks, rows_selected, runs
from steercap.core.schema import REDUCED
from steercap.core.spec import Reduction
from steercap.kernels.codecs import record_of
from steercap.worker.arena import Arena, Form, Layouts, Reads
from steercap.worker.reduce import record_blocks, reduce_rows, rows_of


class CaptureBuffer(ABC):
    """Captured rows of one sample of a request on this rank.

    Args:
        owner: key of the request and number of the sample.
        plan: plan of the request.
        capture: the capture part of the plan.
        layouts: record layouts of this rank.
        arena: arena that the rows are written to.
        reads: SAE encoders that read the rows before they are stored.

    Attributes:
        token_ids: token id that the model read at each position, NONE where it read none: int32 [limit]. A view of the
            request table as long as passes of the request may be pending.
    """

    def __init__(  # noqa: PLR0917 -- what a request is, and where it runs
        self, owner: Owner, plan: Plan, capture: CapturePlan, layouts: Layouts, arena: Arena, reads: Reads = ()
    ) -> None:
        self.owner = owner
        self.capture = capture
        self.limit = plan.limit
        self.failure: str | None = None
        self.writes = 0
        self._nonfinite: tuple[int, int] | None = None  # first position with a non-finite row, and its point
        self._arena = arena
        self._layouts = layouts
        self._points = layouts.points(capture.points)
        self._schemas = layouts.schemas(self._points)
        slot = NONE if capture.vectors is None else capture.vectors.slot
        form = Form(capture.coding, slot, capture.before_edits, reads)
        self._layout = layouts.acquire(capture.points, form) if self._points else None
        if self._points and self._layout is None:
            self.fail("too many requests keep different points at once")
        elif self._layout is not None and not 0 < self._layout.stored.lines <= arena.shape.lines:
            layouts.release(self._layout)
            self._layout = None
            self.fail("the rows of a token take no bytes, or more than a page of the arena")
        self._uses_layout = self._layout is not None
        self.token_ids: npt.NDArray[np.int32] = np.full(plan.limit, NONE, dtype=np.int32)
        self._ranks = ranks(capture.ranges, plan.limit)
        self._stops, self._shifts = runs(capture.ranges, plan.limit)
        self._record = self._record_lines()
        self._places = RecordLines(np.empty(0, dtype=np.int64), arena.shape, self._record)
        self._reduced: tuple[Ints, Ints] | None = None  # labels of the rows that were reduced

    @abstractmethod
    def _record_lines(self) -> int:
        """Return the lines of a record in the arena, 0 where this rank keeps no point."""

    @property
    @abstractmethod
    def _most(self) -> int:
        """Maximum number of records of the request that are in the arena at once."""

    @property
    def layout(self) -> int:
        """Number of the layout of a token's record, NONE if no more tokens are captured on this rank."""
        return self._layout.number if self._layout is not None and self._uses_layout else NONE

    @property
    @abstractmethod
    def accumulator(self) -> int:
        """Index of the running reduction of the rows, NONE if they go to the arena."""

    def place(self, start: int, count: int) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Assign places in the arena to the tokens of a pass.

        Args:
            start: position of the request's first token in this pass.
            count: tokens of the request in this pass.

        Returns:
            True for the tokens that are kept, bool [count]; and the first line of each token's record in the arena,
            NONE where it has none: int64 [count].
        """
        lines: Ints = np.full(count, NONE, dtype=np.int64)
        kept = np.zeros(count, dtype=np.bool_)
        order = self._ranks[start : start + count]  # drafts may lie beyond all the request can keep
        chosen = np.flatnonzero(order >= 0)
        if not len(chosen) or not self._uses_layout:
            return kept, lines
        rows = order[chosen]
        found = self._take(rows)
        if found is None:
            self.fail("the arena is full")
            return kept, lines
        self.writes += len(rows)
        kept[chosen] = True
        lines[chosen] = found
        return kept, lines

    @abstractmethod
    def _take(self, rows: Ints) -> Ints | None:
        """Reserve lines for captured rows, by index; return each one's first (NONE: only reduced), or None if full."""

    def ahead(self, start: int) -> tuple[int, int | None]:
        """Predict the places of tokens from position `start` on; the first captured one allocates the request's pages.

        Returns:
            Position at which the prediction ends, excluded; `start` if nothing can be predicted. And the line that
            position 0's record would have, so that position p's is p × the lines of a record further; None if the
            tokens are not captured or nothing can be predicted.
        """
        run = int(self._stops.searchsorted(start, side="right"))
        if run == len(self._stops):
            return start, None
        end, shift = int(self._stops[run]), int(self._shifts[run])
        return (end, None) if shift < 0 or not self._uses_layout else self._take_ahead(start, end, shift)

    @abstractmethod
    def _take_ahead(self, start: int, end: int, shift: int) -> tuple[int, int | None]:
        """Compute the result of `ahead` for captured positions [start, end); their row numbers are position - shift."""

    def mark_computed(self, start: int, stop: int, rows: int) -> None:  # noqa: ARG002 -- for subclasses
        """Count positions [start, stop) as captured, in `rows` rows at the places that `ahead` predicted."""
        self.writes += rows

    @abstractmethod
    def reads(self, total: int) -> int:
        """Return the number of the sequence's tokens to compute before the rows of the first `total` can be sealed."""

    def fail(self, reason: str) -> None:
        """Mark the rows of the request as invalid; of several reasons, the first is kept."""
        self.failure = self.failure or reason

    def found_nonfinite(self, position: int, point: int) -> None:
        """Record that the row at a position and point is not finite; the first such position is kept."""
        if self._nonfinite is None or position < self._nonfinite[0]:
            self._nonfinite = position, point

    def stop(self) -> None:
        """End the request: release its layout, and what is not needed until the rows are sealed. Idempotent."""
        if self._layout is not None and self._uses_layout:
            self._uses_layout = False
            self._layouts.release(self._layout)
            self._stopped()

    @abstractmethod
    def _stopped(self) -> None:
        """Release resources that are not needed after the request's end."""

    def seal(self, total: int, first: int) -> CapturedRows:
        """Describe the rows of the first `total` inputs in a message; reduce them first if planned. Idempotent.

        Args:
            total: number of input tokens of the sequence, as the client knows it.
            first: number of rows to leave out at the start, because the client has them already.
        """
        rows = len(rows_selected(self.capture.ranges, self.limit, total))
        positions, token_ids = (labels[:rows] for labels in self._reduced or self._labels(rows))
        stored, coding = range(first, rows), self.capture.coding
        failure = self.failure or self._missing(positions)
        if self.capture.reduce:
            stored, coding = range(min(rows, 1)), REDUCED
            if rows and self._points and not failure and self._reduced is None:
                self._reduce(self.capture.reduce, rows, total)
                self._reduced = positions, token_ids
                failure = self.failure
        return CapturedRows(
            owner=self.owner,
            coding=coding,
            points=self._points,
            lines=tuple(self._line_ranges(stored)) if not failure else (),
            stored_rows=len(stored),
            positions=positions[first:].tobytes(),
            token_ids=token_ids[first:].tobytes(),
            writes=self.writes,
            failure=failure,
            nonfinite=self._nonfinite if self._nonfinite and self._nonfinite[0] < total else None,
        )

    def _labels(self, rows: int) -> tuple[Ints, Ints]:
        """Return positions and token ids of the first rows, both NONE where no token was read: int64 [rows] each."""
        positions = np.flatnonzero(self._ranks >= 0)[:rows]
        token_ids = self.token_ids[positions].astype(np.int64)
        return np.where(token_ids == NONE, NONE, positions), token_ids

    @abstractmethod
    def _reduce(self, reduction: Reduction, rows: int, total: int) -> None:
        """Write the reduction of the first rows, of a sequence of `total` inputs, to the first page; or fail."""

    def _line_ranges(self, stored: range) -> Iterator[LineRange]:
        """Return the arena's lines that hold the rows with these numbers, or the row that they were reduced to."""
        ranges = self._places.ranges(stored)
        if not self.capture.reduce:
            return ranges
        lines = record_of(self._schemas, REDUCED).lines
        return (LineRange(one.start, lines) for one in ranges)

    def _reach(self, rows: int) -> bool:
        """Allocate the request's pages if it has none; return whether they hold `rows` records.

        The first call allocates all pages that the request can need, which admission has reserved. They are consecutive
        unless the arena is crowded. Unused pages are freed at the request's end.
        """
        if not len(self._places.pages):
            pages = self._arena.allocate(self._arena.shape.pages(self._most, self._record))
            self._places = RecordLines(pages, self._arena.shape, self._record)
        return rows <= self._places.rows

    def free(self) -> None:
        """End the request, and free all of its pages and other storage."""
        self.stop()
        self._keep(0)

    def _keep(self, pages: int) -> None:
        """Free all pages of the request but the first `pages`."""
        self._arena.free(self._places.pages[pages:])
        self._places = self._places.keep(pages)

    def _missing(self, positions: Ints) -> str | None:
        missing = np.flatnonzero(positions == NONE)
        if not self._points or not len(missing):
            return None
        return f"{len(missing)} of {len(positions)} rows were never computed, the first of them row {missing[0]}"


class ArenaBuffer(CaptureBuffer):
    """Capture buffer whose rows stay in the arena, to be fetched, or reduced once their number is known."""

    def __init__(  # noqa: PLR0917 -- as above
        self, owner: Owner, plan: Plan, capture: CapturePlan, layouts: Layouts, arena: Arena, reads: Reads = ()
    ) -> None:
        super().__init__(owner, plan, capture, layouts, arena, reads)
        self._last = 0  # number of the last row with a place, plus one

    def _record_lines(self) -> int:
        return 0 if self._layout is None else self._layout.stored.lines

    @property
    def _most(self) -> int:
        return int(self._ranks.max()) + 1

    @property
    def accumulator(self) -> int:
        return NONE

    def _take(self, rows: Ints) -> Ints | None:
        last = int(rows.max()) + 1
        if not self._reach(last):
            return None
        self._last = max(self._last, last)
        return self._places.lines(rows)

    def _take_ahead(self, start: int, end: int, shift: int) -> tuple[int, int | None]:
        if not self._reach(start - shift + 1):
            return start, None
        stop, origin = self._places.block(start - shift)
        return min(end, stop + shift), origin - shift * self._record

    def mark_computed(self, start: int, stop: int, rows: int) -> None:
        super().mark_computed(start, stop, rows)
        self._last = max(self._last, int(self._ranks[stop - 1]) + 1)

    def reads(self, total: int) -> int:
        # A reduced row overwrites the first records, and the pages behind it are given back: no row may be on its way.
        return self.limit if self.capture.reduce else total

    def selected(self, total: int) -> int:
        """Return the number of rows that the plan captures of a sequence of `total` inputs."""
        return len(rows_selected(self.capture.ranges, self.limit, total))

    def blocks(self, rows: int) -> Iterator[dict[int, torch.Tensor]]:
        """Yield the first `rows` raw rows in blocks: a dict from point index to [rows of the block, shard width]."""
        if self._layout is not None:
            for records in record_blocks(self._arena, self._line_ranges(range(rows)), self._layout.raw.lines):
                yield dict(zip(self._points, rows_of(records, self._layout, self._schemas), strict=True))

    def _stopped(self) -> None:
        self._keep(self._places.pages_of(self._last))

    def _reduce(self, reduction: Reduction, rows: int, _total: int) -> None:
        assert self._layout is not None
        self.stop()  # a row that came later would land on the reduced one, or in pages that are another's by then
        reduce_rows(self._arena, tuple(self._places.ranges(range(rows))), self._layout, self._schemas, reduction)
        self._keep(1)
