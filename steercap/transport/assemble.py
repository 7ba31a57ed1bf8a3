"""From the records of an arena to one tensor a point.

Number 8 in the life of a request. Shape legend: record = one token's lines, one a point, or several where a stored row
is longer than a line; row = what one record holds of one point.

Rows are gathered by their line numbers, in the order of the result: one call copies any number of pages, so that the
cost of a page is a few nanoseconds of index, and any slice of the result can be filled by itself, on any thread. Fresh
memory costs as much as the copy if it comes 4 KiB at a time; NumPy asks for huge pages (`MADV_HUGEPAGE`) from 4 MiB on,
which torch does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from steercap.core.messages import LineRange, Parcel
from steercap.core.rows import Ints
from steercap.encodings import ENCODINGS
from steercap.errors import CaptureIncomplete
from steercap.transport.reader import Readable

#: Bytes gathered in one go: a millisecond or two of a core, and whole huge pages of the result.
PART_BYTES: Final = 8 << 20


class Assembly:
    """One parcel's rows while they are gathered; its parts can be filled in any order, on any thread.

    Args:
        parcel: what the lines hold.
        width: elements of a row.
        source: the parcel's lines.

    Raises:
        CaptureIncomplete: the lines do not hold the records that the parcel says.
    """

    def __init__(self, parcel: Parcel, width: int, source: Readable) -> None:
        self._parcel = parcel
        self._width = width
        self._source = source.lines.numpy()
        self._places = _places(parcel, source)
        self._result = np.empty((len(self._places), source.lines.shape[1]), dtype=np.uint8)

    @property
    def parts(self) -> list[slice]:
        """Slices of the result that together are all of it."""
        lines = max(1, PART_BYTES // self._result.shape[1])
        return [slice(first, first + lines) for first in range(0, len(self._result), lines)]

    def fill(self, part: slice) -> None:
        """Gather one part; without Python's lock."""
        # `clip`, for places are checked, and `raise` would go through a buffer.
        np.take(self._source, self._places[part], axis=0, out=self._result[part], mode="clip")

    def rows(self) -> torch.Tensor:
        """The rows of every point, in memory of their own, once all parts are filled: [points, rows, width].

        Of rows that were projected, [points, rows, directions].
        """
        points, rows = len(self._parcel.points), self._parcel.stored_rows
        dtype: torch.dtype = getattr(torch, self._parcel.dtype)
        directions = self._parcel.directions
        if not self._result.size:
            return torch.empty((points, rows, directions or self._width), dtype=dtype)
        if directions:
            numbers = torch.from_numpy(self._result.reshape(rows, -1)).view(dtype)
            return numbers[:, : points * directions].view(rows, points, directions).transpose(0, 1).contiguous()
        stored = torch.from_numpy(self._result).view(points, rows, -1)
        return ENCODINGS[self._parcel.codec].decode(stored, dtype, self._width)


def parcel_bytes(parcel: Parcel, width: int) -> int:
    """Bytes of a parcel's rows."""
    dtype: torch.dtype = getattr(torch, parcel.dtype)
    return len(parcel.points) * parcel.stored_rows * (parcel.directions or width) * dtype.itemsize


def assemble(parcel: Parcel, width: int, source: Readable) -> torch.Tensor:
    """Gather the records of a parcel here and now.

    Args:
        parcel: what the lines hold.
        width: elements of a row.
        source: the parcel's lines.

    Returns:
        The rows of every point, in memory of their own: [points, rows, width], dtype of the parcel.

    Raises:
        CaptureIncomplete: the lines do not hold the records that the parcel says.
    """
    assembly = Assembly(parcel, width, source)
    for part in assembly.parts:
        assembly.fill(part)
    return assembly.rows()


def _places(parcel: Parcel, source: Readable) -> Ints:
    """The line of each line of the result, point by point and row by row: int64 [points × rows × lines of a row]."""
    starts, counts = _arrays(source.ranges)
    points, rows = len(parcel.points), parcel.stored_rows
    lines = int(counts.sum())
    if not rows and not lines:
        return np.empty(0, dtype=np.int64)
    record = lines // max(rows, 1)
    if parcel.directions:  # the numbers of all points together
        points = 1
    if not rows or not points or not record or record % points or lines != rows * record or (counts % record).any():
        raise CaptureIncomplete(
            f"{parcel.owner.key}: {rows} records of {points} points expected, the worker names {lines} lines"
        )
    if (starts < 0).any() or (starts + counts > len(source.lines)).any():
        raise CaptureIncomplete(f"{parcel.owner.key}: the worker names lines outside of its arena")
    # Lines of all ranges one after the other: a range's start, less what came before it, plus the line's own number.
    shifts = np.repeat(starts - (np.cumsum(counts) - counts), counts // record)
    records = shifts + np.arange(0, lines, record)
    of_a_row = record // points
    places: Ints = np.arange(0, record, of_a_row)[:, None, None] + records[:, None] + np.arange(of_a_row)
    return places.reshape(-1)


def _arrays(ranges: Sequence[LineRange]) -> tuple[Ints, Ints]:
    starts = np.fromiter((item.start for item in ranges), dtype=np.int64, count=len(ranges))
    return starts, np.fromiter((item.count for item in ranges), dtype=np.int64, count=len(ranges))
