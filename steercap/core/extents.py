"""Allocator of blocks in a file: pure bookkeeping of the free extents."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple


class Extent(NamedTuple):
    """Consecutive blocks."""

    start: int
    length: int


class Extents:
    """Allocator of `total` blocks, which takes the lowest free ones first.

    A request is split into several extents where it has to be, so nothing is lost to fragmentation, and no block beyond
    the first `total` is ever used.

    Args:
        total: number of blocks.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._free = [Extent(0, total)] if total else []  # ascending, never adjacent

    @property
    def in_use(self) -> int:
        """Number of allocated blocks."""
        return self.total - self.free

    def take(self, count: int) -> list[Extent] | None:
        """Allocate `count` blocks, in one extent if one is large enough; return None if fewer are free."""
        if count > self.free:
            return None
        whole = next((index for index, extent in enumerate(self._free) if extent.length >= count), None)
        taken = []
        while count:
            index = 0 if whole is None else whole
            start, room = self._free[index]
            used = min(room, count)
            taken.append(Extent(start, used))
            self._free[index : index + 1] = [Extent(start + used, room - used)] if room > used else []
            count, self.free = count - used, self.free - used
        return taken

    def give(self, extents: Iterable[Extent]) -> None:
        """Free allocated blocks."""
        for start, count in extents:
            index = bisect_left(self._free, (start, 0))
            first, stop = start, start + count
            before = self._free[index - 1] if index else None
            after = self._free[index] if index < len(self._free) else None
            low, high = index, index
            if before is not None and sum(before) == start:
                first, low = before.start, index - 1
            if after is not None and after.start == stop:
                stop, high = sum(after), index + 1
            self._free[low:high] = [Extent(first, stop - first)]
            self.free += count
