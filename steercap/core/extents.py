"""Which stretches of a file are free: pure bookkeeping, in blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple


class Extent(NamedTuple):
    """Consecutive blocks."""

    start: int
    length: int


class Extents:
    """Blocks 0 to `total`, handed out from the lowest on.

    What is asked for comes in pieces where it has to, so nothing is lost to fragments, and no block beyond the first
    `total` is ever used.

    Args:
        total: how many there are.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._free = [Extent(0, total)] if total else []  # ascending, never adjacent

    @property
    def in_use(self) -> int:
        """Blocks that are taken."""
        return self.total - self.free

    def take(self, count: int) -> list[Extent] | None:
        """Take so many blocks, in one piece if there is one that large; None if there are not so many."""
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
        """Take blocks back that were handed out."""
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
