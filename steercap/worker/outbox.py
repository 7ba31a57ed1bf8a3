"""One request's rows while they come in, or the reduction that runs along with them; and the parcel they become.

Number 6 and 7 in the life of a request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.messages import LineRange, Owner, Parcel
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import NONE
from steercap.core.rows import Ints, ranks, rows_selected, runs
from steercap.core.spec import Reduction
from steercap.worker.arena import Arena
from steercap.worker.layouts import Layouts
from steercap.worker.reduce import REDUCED_DTYPE, Accumulator, reduce_rows
from steercap.worker.tallies import EMPTY
from steercap.worker.taps.base import Taps

#: Dtype of what rows are projected to.
PROJECTED_DTYPE: Final = torch.float32


class Record(NamedTuple):
    """A token's record.

    Args:
        layout: its layout, NONE if there is none.
        rows: rows that are copied, one a point.
        lines: its lines in the arena.
        projection: slot of what the rows are projected on, NONE if they are kept whole.
        evidence: what the copies of one token add up to.
    """

    layout: int = NONE
    rows: int = 0
    lines: int = 0
    projection: int = NONE
    evidence: int = 0


class Outbox(ABC):
    """What is kept of one sample of one request on this rank.

    Args:
        owner: whose rows.
        plan: the request.
        capture: what it keeps.
        layouts: the records' layouts on this rank.
        arena: where the rows go.
    """

    def __init__(self, owner: Owner, plan: Plan, capture: CapturePlan, layouts: Layouts, arena: Arena) -> None:
        self.owner = owner
        self.capture = capture
        self.limit = plan.limit
        self.failure: str | None = None
        self.writes = 0
        self._nonfinite: tuple[int, int] | None = None  # the first position with such a row, and its point
        self._arena = arena
        self._layouts = layouts
        self._points = layouts.points(capture.points)
        self._layout = layouts.acquire(capture.points, before_edits=capture.before_edits) if self._points else None
        if self._points and self._layout is None:
            self.fail("too many requests keep different points at once")
        self._ranks = ranks(capture.ranges, plan.limit)
        self._stops, self._shifts = runs(capture.ranges, plan.limit)
        self._record = capture.lines(len(self._points), arena.shape.line_bytes)
        self._per_page = arena.shape.records(self._record) if self._points else 0
        self._pages: Ints = np.empty(0, dtype=np.int64)
        self._reduced: tuple[Ints, Ints] | None = None  # labels of the rows that were reduced

    @property
    def record(self) -> Record:
        """What a token's record is."""
        if self._layout is None:
            return Record()
        projection = self.capture.projection.slot if self.capture.projection else NONE
        return Record(self._layout.number, len(self._points), self._record, projection, self._layout.evidence)

    @property
    @abstractmethod
    def tally(self) -> int:
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
        if not len(chosen) or self._layout is None:
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
        if shift < 0 or self._layout is None:
            return end, None
        return self._take_ahead(start, end, shift)

    @abstractmethod
    def _take_ahead(self, start: int, end: int, shift: int) -> tuple[int, int | None]:
        """What `ahead` says of positions up to `end` that are kept; row = position - shift."""

    def went_on(self, start: int, stop: int) -> None:
        """The tokens of these positions were kept, each where `ahead` said."""
        self.writes += stop - start

    @abstractmethod
    def reads(self, total: int) -> int:
        """How many tokens of the sequence must be heard of before the rows of the first `total` can be sealed."""

    def fail(self, reason: str) -> None:
        """The rows cannot be trusted; the first reason is kept."""
        self.failure = self.failure or reason

    def found_nonfinite(self, position: int, point: int) -> None:
        """The row of a position at a point was not finite; the first position is kept."""
        if self._nonfinite is None or position < self._nonfinite[0]:
            self._nonfinite = position, point

    def stop(self) -> None:
        """The request runs no more: what it did not get to is free. Idempotent."""
        if self._layout is not None:
            self._layouts.release(self._layout)
            self._layout = None
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
        stored, record = range(first, rows), self._record
        dtype = self._arena.dtype if self.capture.projection is None else PROJECTED_DTYPE
        failure = self.failure or self._missing(positions)
        if self.capture.reduce:
            stored, dtype = range(min(rows, 1)), REDUCED_DTYPE
            record *= dtype.itemsize // self._arena.dtype.itemsize
            if rows and self._points and not failure and self._reduced is None:
                self._reduce(self.capture.reduce, rows, total)
                self._reduced = positions, token_ids
                failure = self.failure
        return Parcel(
            owner=self.owner,
            codec=self.capture.codec,
            points=self._points,
            lines=tuple(self._line_ranges(stored, record)) if not failure else (),
            stored_rows=len(stored),
            dtype=str(dtype).removeprefix("torch."),
            positions=positions[first:].tobytes(),
            token_ids=token_ids[first:].tobytes(),
            writes=self.writes,
            failure=failure,
            directions=self.capture.projection.directions if self.capture.projection else 0,
            nonfinite=self._nonfinite if self._nonfinite and self._nonfinite[0] < total else None,
        )

    def _lines(self, rows: Ints) -> Ints:
        """First line of each row's record."""
        page, slot = np.divmod(rows, self._per_page)
        lines: Ints = self._pages[page] * self._arena.shape.lines + slot * self._record
        return lines

    @abstractmethod
    def _labels(self, rows: int) -> tuple[Ints, Ints]:
        """Position and token id of the first rows, as the model read them, NONE where none came: int64 [rows] each."""

    @abstractmethod
    def _reduce(self, reduction: Reduction, rows: int, total: int) -> None:
        """Put the reduction of the first rows, of a sequence of `total` inputs, into the first page; or fail."""

    def _line_ranges(self, rows: range, record: int) -> Iterator[LineRange]:
        """The lines of these rows, `record` each, consecutive pages together; rows never reached have none."""
        page = rows.start // self._per_page if self._points else len(self._pages)
        while page < len(self._pages) and page * self._per_page < rows.stop:
            pages = self._consecutive(page)
            start = max(rows.start - page * self._per_page, 0)
            stop = min(rows.stop - page * self._per_page, pages * self._per_page)
            if start < stop:
                first = self._pages[page].item() * self._arena.shape.lines
                yield LineRange(first + start * record, (stop - start) * record)
            page += pages

    def _consecutive(self, page: int) -> int:
        """How many pages from this one on hold their records one behind the other, without a gap."""
        if self._per_page * self._record < self._arena.shape.lines:
            return 1
        left = len(self._pages) - page
        if self._pages[-1] - self._pages[page] == left - 1:  # which nearly always is all of them
            return left
        steps = np.flatnonzero(np.diff(self._pages[page:]) != 1)
        return int(steps[0]) + 1

    def free(self) -> None:
        """Give the pages back."""
        self.stop()
        self._keep(0)

    def _keep(self, pages: int) -> None:
        """Give back all but the first pages."""
        self._arena.free(self._pages[pages:])
        self._pages = self._pages[:pages]

    def _missing(self, positions: Ints) -> str | None:
        missing = np.flatnonzero(positions == NONE)
        if not self._points or not len(missing):
            return None
        return f"{len(missing)} of {len(positions)} rows were never computed, the first of them row {missing[0]}"


class RowsOutbox(Outbox):
    """An outbox whose rows wait in the arena, each in its place, to be fetched, or reduced once their end is known."""

    _last = 0  # one more than the last row that has a place

    @property
    def tally(self) -> int:
        return NONE

    def _take(self, rows: Ints) -> Ints | None:
        if not self._reach(int(rows.max())):
            return None
        self._last = max(self._last, int(rows.max()) + 1)
        return self._lines(rows)

    def _take_ahead(self, start: int, end: int, shift: int) -> tuple[int, int | None]:
        if not self._reach(start - shift):
            return start, None
        page, record = (start - shift) // self._per_page, self._record
        first = page * self._per_page + shift
        stop = first + self._per_page * self._consecutive(page)
        return min(end, stop), self._pages[page].item() * self._arena.shape.lines - first * record

    def went_on(self, start: int, stop: int) -> None:
        super().went_on(start, stop)
        self._last = max(self._last, int(self._ranks[stop - 1]) + 1)

    def reads(self, total: int) -> int:
        # A reduced row lies over the first records, and the pages behind it are given back: nothing may come late.
        return self.limit if self.capture.reduce else total

    def _stopped(self) -> None:
        self._keep(-(-self._last // self._per_page))

    def _labels(self, rows: int) -> tuple[Ints, Ints]:
        reached = min(rows, len(self._pages) * self._per_page)
        labels = np.full((2, rows), NONE, dtype=np.int64)
        if reached and reached <= self._consecutive(0) * self._per_page:
            first, record = self._pages[0].item() * self._arena.shape.lines, self._record
            labels[:, :reached] = self._arena.labels(slice(first, first + reached * record, record))
        elif reached:
            labels[:, :reached] = self._arena.labels(self._lines(np.arange(reached)))
        return labels[0], labels[1]

    def _reach(self, row: int) -> bool:
        """Have a page for `row` and all before it.

        At the first row all that the request can need: they were reserved for it before it came, lie one behind the
        other where the arena is not crowded, and need no thought later. What it did not need is given back at its end.
        """
        if not len(self._pages):
            self._pages = self._arena.allocate(self._arena.shape.pages(int(self._ranks.max()) + 1, self._record))
        return row // self._per_page < len(self._pages)

    def _reduce(self, reduction: Reduction, rows: int, _total: int) -> None:
        lines = tuple(self._line_ranges(range(rows), self._record))
        reduce_rows(self._arena, lines, len(self._points), reduction)
        self._keep(1)


class TallyOutbox(Outbox):
    """An outbox whose rows are reduced as they come: only the reduction ever reaches the arena, when the request ends.

    Args:
        owner, plan, capture, layouts, arena: as for `Outbox`.
        taps: where the reduction runs.
    """

    def __init__(  # noqa: PLR0917 -- as for `Outbox`
        self, owner: Owner, plan: Plan, capture: CapturePlan, layouts: Layouts, arena: Arena, taps: Taps
    ) -> None:
        super().__init__(owner, plan, capture, layouts, arena)
        assert capture.reduce is not None
        self._taps = taps
        self._tally = taps.tallies.acquire(capture.reduce, plan.prompt_len) if self._layout else None
        self._token_ids: Ints = np.full(plan.limit, NONE, dtype=np.int64)  # that the model read at each position
        self._spilled: tuple[int, Ints] | None = None  # rows added, and positions of those held apart
        self._copied: Any = None
        if self._layout and self._tally is None:
            self.fail(
                f"{taps.tallies.total} reductions run at once, and no more can; raise SteerModel(..., reduce_bytes=)"
            )

    @property
    def tally(self) -> int:
        return NONE if self._tally is None else self._tally

    def _take(self, rows: Ints) -> Ints | None:
        return np.full_like(rows, NONE) if self._reach() else None

    def _take_ahead(self, start: int, end: int, shift: int) -> tuple[int, int | None]:  # noqa: ARG002 -- rows have no line
        return (end, 0) if self._reach() else (start, None)

    def reads(self, total: int) -> int:  # noqa: ARG002 -- whatever was added must have been
        return self.limit

    def label(self, positions: Ints | int, token_ids: Ints | int) -> None:
        """Say what the model read where rows were added, or held apart."""
        self._token_ids[positions] = token_ids

    def _stopped(self) -> None:
        if not self.writes:
            self._keep(0)
        if self._tally is not None:
            self._taps.tallies.end(self._tally, self._spill)

    def free(self) -> None:
        self._release()
        super().free()

    def _release(self) -> tuple[int, Ints]:
        """Let go of the tally; rows added, and positions of those held apart."""
        self.stop()
        place, self._tally = self._tally, None
        return (0, np.empty(0, dtype=np.int64)) if place is None else self._taps.tallies.release(place)

    def _spill(self) -> None:
        """Put the tally, and what is held of it, into the arena: another request needs its place."""
        assert self._tally is not None
        if len(self._pages) and not self.failure:
            self._copied = self._taps.spill(self._tally, len(self._points), self._places)
        self._spilled = self._release()

    @property
    def _places(self) -> Ints:
        """First line of each record in the arena."""
        return self._lines(np.arange(tally_records(self._arena.dtype, self._taps.tallies.held)))

    def _labels(self, rows: int) -> tuple[Ints, Ints]:
        positions = np.flatnonzero(self._ranks >= 0)[:rows]
        token_ids = self._token_ids[positions]
        return np.where(token_ids == NONE, NONE, positions), token_ids

    def _reach(self) -> bool:
        """Have the pages that the tally will need."""
        records = tally_records(self._arena.dtype, self._taps.tallies.held)
        if not len(self._pages):
            self._pages = self._arena.allocate(self._arena.shape.pages(records, len(self._points)))
        return len(self._pages) * self._per_page >= records

    def _reduce(self, reduction: Reduction, rows: int, total: int) -> None:
        if self._spilled is None:  # the others are finished together
            self.fail("its reduction was never finished")
            return
        if self._copied is not None:
            self._taps.landed(self._copied)
        added, positions = self._spilled
        late = np.flatnonzero((positions != EMPTY) & (positions < total))
        late = late[np.argsort(positions[late])]
        if self._has(added + len(late), rows):
            record, share = len(self._points), REDUCED_DTYPE.itemsize // self._arena.dtype.itemsize
            first, *held = self._places[[0, *(share + late)]].tolist()
            lines = self._arena.lines
            sums = lines[first : first + record * share].view(REDUCED_DTYPE).view(record, -1)
            accumulator = Accumulator(reduction, sums.clone(), added) if added else Accumulator(reduction)
            for line in held:
                accumulator.add(lines[line : line + record][None])
            sums.copy_(accumulator.result())
            self._keep(1)

    def _has(self, found: int, rows: int) -> bool:
        """Whether as many rows were added as the sequence has; if not, the reduction is of something else."""
        if found != rows:
            self.fail(f"{found} rows were reduced, and {rows} are selected")
        return found == rows

    def rows_to_finish(self, total: int) -> int:
        """How many rows the reduction of a sequence of so many inputs has, if it can and must be finished; else 0."""
        if self._tally is None or self.failure:
            return 0
        rows = len(rows_selected(self.capture.ranges, self.limit, total))
        return rows if self._missing(self._labels(rows)[0]) is None else 0

    def finished(self, rows: int, found: int) -> None:
        """The reduction of the first rows is in the arena, if as many were found."""
        if self._has(found, rows):
            self._reduced = self._labels(rows)
            self._release()
            self._keep(1)

    @property
    def target(self) -> tuple[int, int]:
        """Where its reduction goes in the arena, the first line, and how many points it has."""
        return int(self._places[0]), len(self._points)


def finish(taps: Taps, asked: Mapping[Outbox, int]) -> None:
    """Have the reductions that still run along end up in the arena, all of them together.

    Args:
        taps: where they run.
        asked: how many inputs the sequence of each outbox has.
    """
    running = [(box, total) for box, total in asked.items() if isinstance(box, TallyOutbox)]
    ready = [(box, total, rows) for box, total in running if (rows := box.rows_to_finish(total))]
    if not ready:
        return
    places, totals = np.array([(box.tally, total) for box, total, _ in ready]).T
    moves, found = taps.tallies.finish(places, totals)
    divisors = np.where([box.capture.reduce == "mean" for box, *_ in ready], found, 1)
    lines, records = np.array([box.target for box, *_ in ready]).T
    taps.landed(taps.finish(moves, divisors, records, lines))
    for (box, _, rows), added in zip(ready, found.tolist(), strict=True):
        box.finished(rows, added)


def tally_records(dtype: torch.dtype, held: int) -> int:
    """Records that a reduction takes in the arena: its float32 rows, and those held apart."""
    return REDUCED_DTYPE.itemsize // dtype.itemsize + held
