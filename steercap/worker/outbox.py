"""One request's rows while they come in, and the parcel they become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.coding import REDUCED
from steercap.core.messages import LineRange, Owner, Parcel
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import NONE
from steercap.core.rows import Ints, Places, ranks, rows_selected, runs
from steercap.core.spec import Reduction
from steercap.kernels.codecs import record_of
from steercap.worker.arena import Arena
from steercap.worker.layouts import Form, Layouts, Reads
from steercap.worker.reduce import record_blocks, reduce_rows, rows_of


class Outbox(ABC):
    """What is kept of one sample of one request on this rank.

    Args:
        owner: whose rows.
        plan: the request.
        capture: what it keeps.
        layouts: the records' layouts on this rank.
        arena: where the rows go.
        reads: what reads them before they are stored.

    Attributes:
        token_ids: the token that the model read at each position, NONE where it read none: int32 [limit]. The ledger's,
            as long as passes of the request may be pending.
    """

    def __init__(  # noqa: PLR0917 -- what a request is, and where it runs
        self, owner: Owner, plan: Plan, capture: CapturePlan, layouts: Layouts, arena: Arena, reads: Reads = ()
    ) -> None:
        self.owner = owner
        self.capture = capture
        self.limit = plan.limit
        self.failure: str | None = None
        self.writes = 0
        self._nonfinite: tuple[int, int] | None = None  # the first position with such a row, and its point
        self._arena = arena
        self._layouts = layouts
        self._points = layouts.points(capture.points)
        self._schemas = layouts.schemas(self._points)
        self._layout = layouts.acquire(capture.points, _form(capture, reads)) if self._points else None
        if self._points and self._layout is None:
            self.fail("too many requests keep different points at once")
        elif self._layout is not None and not 0 < self._layout.stored.lines <= arena.shape.lines:
            layouts.release(self._layout)
            self._layout = None
            self.fail("a token's rows have no bytes, or more than a page of the arena")
        self._uses_layout = self._layout is not None
        self.token_ids: npt.NDArray[np.int32] = np.full(plan.limit, NONE, dtype=np.int32)
        self._ranks = ranks(capture.ranges, plan.limit)
        self._stops, self._shifts = runs(capture.ranges, plan.limit)
        self._record = self._record_lines()
        self._places = Places(np.empty(0, dtype=np.int64), arena.shape, self._record)
        self._reduced: tuple[Ints, Ints] | None = None  # labels of the rows that were reduced

    @abstractmethod
    def _record_lines(self) -> int:
        """Lines of a record in the arena, 0 where this rank keeps no point."""

    @property
    @abstractmethod
    def _most(self) -> int:
        """The most records that the request can have in the arena."""

    @property
    def layout(self) -> int:
        """The layout of a token's record, NONE if it is not kept here, or no longer is."""
        return self._layout.number if self._layout is not None and self._uses_layout else NONE

    @property
    @abstractmethod
    def accumulator(self) -> int:
        """The reduction that runs along with the rows, NONE if they go to the arena."""

    def place(self, start: int, count: int) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Find out where the tokens of a pass go.

        Args:
            start: position of the request's first token in this pass.
            count: tokens of the request in this pass.

        Returns:
            Which of them are kept, bool [count]; and the first line of each record in the arena, NONE where none is:
            int64 [count].
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
        """The first line of each row's record, NONE where a row has none; None when there is no room for them."""

    def ahead(self, start: int) -> tuple[int, int | None]:
        """How far the tokens from `start` on are kept alike, and where.

        Returns:
            The first position that is not like `start`, and a number that, with a record's lines for each position
            added, gives the first line of a position's record; None when they are not kept.
        """
        run = int(np.searchsorted(self._stops, start, side="right"))
        if run == len(self._stops):
            return start, None
        end, shift = int(self._stops[run]), int(self._shifts[run])
        if shift < 0 or not self._uses_layout:
            return end, None
        return self._take_ahead(start, end, shift)

    @abstractmethod
    def _take_ahead(self, start: int, end: int, shift: int) -> tuple[int, int | None]:
        """What `ahead` says of positions up to `end` that are kept; row = position - shift."""

    def ran(self, start: int, stop: int) -> None:
        """The tokens of these positions were kept, each where `ahead` said."""
        self.writes += stop - start

    @abstractmethod
    def reads(self, total: int) -> int:
        """How many tokens must be computed before the rows of the first `total` can be sealed."""

    def fail(self, reason: str) -> None:
        """The rows cannot be trusted; the first reason is kept."""
        self.failure = self.failure or reason

    def found_nonfinite(self, position: int, point: int) -> None:
        """The row at a position and point was not finite; the first such position is kept."""
        if self._nonfinite is None or position < self._nonfinite[0]:
            self._nonfinite = position, point

    def stop(self) -> None:
        """The request has ended: give back what it did not use. Idempotent."""
        if self._layout is not None and self._uses_layout:
            self._uses_layout = False
            self._layouts.release(self._layout)
            self._stopped()

    @abstractmethod
    def _stopped(self) -> None:
        """Give back what is not needed after the request's end."""

    def seal(self, total: int, first: int) -> Parcel:
        """Say where the rows of the first `total` inputs are; reduce them first if the plan says so. Idempotent.

        Args:
            total: inputs of the sequence, as far as the client knows it.
            first: rows to leave out, because the client has them already.
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
        return Parcel(
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
        """Position and token id of the first rows, as the model read them, NONE where none came: int64 [rows] each."""
        positions = np.flatnonzero(self._ranks >= 0)[:rows]
        token_ids = self.token_ids[positions].astype(np.int64)
        return np.where(token_ids == NONE, NONE, positions), token_ids

    @abstractmethod
    def _reduce(self, reduction: Reduction, rows: int, total: int) -> None:
        """Put the reduction of the first rows, of a sequence of `total` inputs, into the first page; or fail."""

    def _line_ranges(self, stored: range) -> Iterator[LineRange]:
        """Where in the arena these rows are, or the one that they were reduced to."""
        ranges = self._places.ranges(stored)
        if not self.capture.reduce:
            return ranges
        lines = record_of(self._schemas, REDUCED).lines
        return (LineRange(one.start, lines) for one in ranges)

    def _reach(self, rows: int) -> bool:
        """Have room for so many records.

        The first time, take all pages that the request can need. They were reserved before it came, are consecutive
        unless the arena is crowded, and need no thought later. Those that it did not need are given back at its end.
        """
        if not len(self._places.pages):
            pages = self._arena.allocate(self._arena.shape.pages(self._most, self._record))
            self._places = Places(pages, self._arena.shape, self._record)
        return rows <= self._places.rows

    def free(self) -> None:
        """Give the pages back."""
        self.stop()
        self._keep(0)

    def _keep(self, pages: int) -> None:
        """Give back all but the first pages."""
        self._arena.free(self._places.pages[pages:])
        self._places = self._places.keep(pages)

    def _missing(self, positions: Ints) -> str | None:
        missing = np.flatnonzero(positions == NONE)
        if not self._points or not len(missing):
            return None
        return f"{len(missing)} of {len(positions)} rows were never computed, the first of them row {missing[0]}"


class RowsOutbox(Outbox):
    """An outbox whose rows wait in the arena, each in its place, to be fetched, or reduced once their end is known."""

    def __init__(  # noqa: PLR0917 -- as above
        self, owner: Owner, plan: Plan, capture: CapturePlan, layouts: Layouts, arena: Arena, reads: Reads = ()
    ) -> None:
        super().__init__(owner, plan, capture, layouts, arena, reads)
        self._last = 0  # one more than the last row that has a place

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

    def ran(self, start: int, stop: int) -> None:
        super().ran(start, stop)
        self._last = max(self._last, int(self._ranks[stop - 1]) + 1)

    def reads(self, total: int) -> int:
        # A reduced row overwrites the first records, and the pages behind it are given back: no row may be on its way.
        return self.limit if self.capture.reduce else total

    def selected(self, total: int) -> int:
        """How many rows a sequence of `total` inputs has."""
        return len(rows_selected(self.capture.ranges, self.limit, total))

    def blocks(self, rows: int) -> Iterator[dict[int, torch.Tensor]]:
        """The first rows, raw, in blocks: by the index of a point among the armed, [rows, shard width]."""
        if self._layout is not None:
            for records in record_blocks(self._arena, self._places.ranges(range(rows)), self._layout.raw.lines):
                yield dict(zip(self._points, rows_of(records, self._layout, self._schemas), strict=True))

    def _stopped(self) -> None:
        self._keep(self._places.pages_of(self._last))

    def _reduce(self, reduction: Reduction, rows: int, _total: int) -> None:
        assert self._layout is not None
        self.stop()  # a row that came later would land on the reduced one, or in pages that are another's by then
        reduce_rows(self._arena, tuple(self._places.ranges(range(rows))), self._layout, self._schemas, reduction)
        self._keep(1)


def _form(capture: CapturePlan, reads: Reads) -> Form:
    slot = NONE if capture.vectors is None else capture.vectors.slot
    return Form(capture.coding, slot, capture.before_edits, reads)
