"""Arithmetic from the position of a row to its lines in the arena, and allocation of arena pages.

Shape legend: `rows` = selected positions in order, `record` = the stored rows of one token, laid out by `core.schema`
in lines of the arena, `block` = consecutive pages of a request.

The line of a row depends on its position alone, so a position computed twice (preemption, rejected
drafts) overwrites the earlier row: the last write wins, and no row is stored twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from steercap.core.messages import LineRange
from steercap.core.schema import LINE_BYTES, PAGE_BYTES
from steercap.core.tokens import Range, selected
from steercap.errors import InvalidSpec

Ints: TypeAlias = npt.NDArray[np.int64]


@lru_cache(maxsize=256)
def ranks(ranges: tuple[Range, ...], limit: int) -> Ints:
    """Return the row index of each position below `limit`, -1 if it is not selected: int64 [limit], read-only."""
    mask = selected(ranges, limit)
    order = np.cumsum(mask, dtype=np.int64) - 1
    order[~mask] = -1
    order.flags.writeable = False
    return order


@lru_cache(maxsize=256)
def runs(ranges: tuple[Range, ...], limit: int) -> tuple[Ints, Ints]:
    """Split the positions below `limit` into maximal runs that are selected contiguously, or not selected.

    Returns:
        The first position after each run, ascending; and the number to subtract from a position in the run to get its
        row index, or -1 for a run that is not selected: int64 [runs] each.
    """
    order = ranks(ranges, limit)
    shifts = np.where(order >= 0, np.arange(limit) - order, -1)
    stops = ends_of_runs(shifts)
    return stops, shifts[stops - 1]


def ends_of_runs(values: npt.NDArray[np.integer]) -> Ints:
    """Return the end index (exclusive) of each run of equal values, ascending: int64 [runs]."""
    changes: Ints = np.flatnonzero(np.diff(values)) + 1
    return np.append(changes, len(values)) if len(values) else changes


def rows_selected(ranges: tuple[Range, ...], limit: int, total: int) -> Ints:
    """Return the selected positions below `total`, ascending: int64 [rows]."""
    return np.flatnonzero(ranks(ranges, limit)[:total] >= 0)


def latest_per_position(positions: npt.NDArray[np.integer]) -> Ints:
    """Return the indices of the last row of each position, ordered by position: int64 [kept].

    Files of other programs may repeat positions: tokens that are preempted, or drafted and rejected, are computed
    again, and the later row is valid.

    Args:
        positions: positions of the rows of one sequence, in the order in which they were written, int [rows].
    """
    flat = np.asarray(positions)
    if flat.ndim != 1 or flat.dtype.kind not in "iu":
        raise InvalidSpec(f"positions are {flat.dtype} of shape {flat.shape}; give one whole number per row")
    _, from_the_end = np.unique(flat[::-1], return_index=True)
    kept: Ints = len(flat) - 1 - from_the_end.astype(np.int64)
    return kept


@dataclass(frozen=True)
class PageShape:
    """Size of an arena page, in lines."""

    lines: int

    @property
    def page_bytes(self) -> int:
        """Number of bytes of a page."""
        return self.lines * LINE_BYTES

    def records(self, lines: int) -> int:
        """Return the number of records of `lines` lines each that fit in a page."""
        return self.lines // lines

    def pages(self, rows: int, lines: int) -> int:
        """Return the number of pages that `rows` records of `lines` lines need if no two pages are consecutive."""
        return -(-rows // self.records(lines)) if rows else 0


def page_shape(lines: int, target_bytes: int = PAGE_BYTES) -> PageShape:
    """Choose a page size near `target_bytes` that is a multiple of a record of all points, at least two.

    Two, because a reduction is stored as float32, twice the size of a record of a 16-bit dtype.

    Args:
        lines: number of lines of a record of all points, in the widest encoding.
        target_bytes: target size of a page in bytes.
    """
    return PageShape(lines * max(2, target_bytes // (lines * LINE_BYTES)))


class RecordLines:
    """Arena lines of a request's records, given its pages.

    Records are contiguous within each block of consecutive pages, across page borders; no record spans two blocks.
    Nearly always all pages are one block.

    Args:
        pages: page numbers of the request, ascending: int64 [pages].
        page: size of a page.
        record: number of lines of a record.
    """

    def __init__(self, pages: Ints, page: PageShape, record: int) -> None:
        self.pages = pages
        self._page = page
        self._record = record
        #: Number of records that fit in the pages.
        self.rows = 0
        #: For each block: the first row after it, and the line of row 0 if the block is extended backwards to it.
        self._ends: list[int] = []
        self._origins: list[int] = []
        if not len(pages):
            return
        whole = int(pages[-1]) - int(pages[0]) == len(pages) - 1
        jumps = [] if whole else ((pages[1:] - pages[:-1] != 1).nonzero()[0] + 1).tolist()
        for first, stop in pairwise([0, *jumps, len(pages)]):
            self._origins.append(int(pages[first]) * page.lines - self.rows * record)
            self.rows += (stop - first) * page.lines // record
            self._ends.append(self.rows)

    def lines(self, rows: Ints) -> Ints:
        """Return the first line of each row's record, for row indices below `self.rows`: int64 [rows]."""
        blocks = np.searchsorted(self._ends, rows, side="right")
        return np.array(self._origins)[blocks] + rows * self._record

    def block(self, row: int) -> tuple[int, int]:
        """Return the end and the origin of the block of consecutive pages with a row's record.

        Returns:
            The index after the block's last row; and the origin, so that the record of a row in the block begins at
            line origin + row * lines of a record.
        """
        block = bisect_right(self._ends, row)
        return self._ends[block], self._origins[block]

    def ranges(self, rows: range) -> Iterator[LineRange]:
        """Yield the line ranges of these rows' records, in order, one for each block."""
        start = rows.start
        while start < min(rows.stop, self.rows):
            end, origin = self.block(start)
            stop = min(end, rows.stop)
            yield LineRange(origin + start * self._record, (stop - start) * self._record)
            start = stop

    def pages_of(self, rows: int) -> int:
        """Return the number of pages that the first `rows` records occupy, at least in part."""
        if not rows:
            return 0
        _, origin = self.block(rows - 1)
        last = (origin + rows * self._record - 1) // self._page.lines
        return int(self.pages.searchsorted(last)) + 1

    def keep(self, pages: int) -> RecordLines:
        """Return the lines for the first `pages` pages alone; their records keep their lines."""
        return RecordLines(self.pages[:pages], self._page, self._record)


class PageAllocator:
    """Allocator of page numbers 0 to `total` - 1, lowest first, so that the pages in use stay compact."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.touched = 0
        self.in_use = 0
        self._free = np.ones(total, dtype=np.bool_)
        self._lowest = 0  # no page below it is free

    def allocate(self, count: int) -> Ints:
        """Allocate the lowest free pages and return them, ascending: int64 [count], or fewer if no more are free."""
        start, window = self._lowest, max(256, 4 * count)
        found: Ints = start + self._free[start : start + window].nonzero()[0]
        while (start := start + window) < self.total and len(found) < count:
            found = np.concatenate([found, start + self._free[start : start + window].nonzero()[0]])
        found = found[:count]
        if len(found):
            self._free[found] = False
            self._lowest = int(found[-1]) + 1
            self.touched = max(self.touched, self._lowest)
            self.in_use += len(found)
        return found

    def free(self, pages: Ints) -> None:
        """Return allocated pages to the allocator."""
        if len(pages):
            self._free[pages] = True
            self._lowest = min(self._lowest, int(pages.min()))
            self.in_use -= len(pages)

    def forget_untouched(self, keep: int) -> int:
        """Return one more than the highest page ever allocated; if none is in use, lower that to at most `keep`."""
        touched = self.touched
        if self.in_use == 0:
            self.touched = min(touched, keep)
        return touched
