"""From pages of records to one tensor a point.

Number 8 in the life of a request. Shape legend: record = one token's lines, one a point; page = whole records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from steercap.codecs import CODECS
from steercap.core.messages import Attached, LineRange, Parcel


def page_ranges(parcel: Parcel, attached: Attached) -> list[LineRange]:
    """The lines that hold the parcel's records, page by page."""
    return [LineRange(first, count) for first, count in _filled(parcel, attached)]


def assemble(parcel: Parcel, attached: Attached, pages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gather the records of a parcel.

    Args:
        parcel: where the records are.
        attached: the shape of the arena they are in.
        pages: lines of each page, uint8 [lines, line bytes], as `page_ranges` lists them.

    Returns:
        The rows of every point, in memory of their own: [points, rows, width], dtype of the parcel.
    """
    dtype: torch.dtype = getattr(torch, parcel.dtype)
    codec = CODECS[parcel.plan.codec]
    points = len(parcel.points)
    rows = torch.empty((points, parcel.stored_rows, attached.width), dtype=dtype)
    row = 0
    for page in pages:
        records = page.view(-1, points, page.numel() // (_records(page, parcel, attached) * points))
        decoded = codec.decode(records, dtype, attached.width)
        rows[:, row : row + len(decoded)].copy_(decoded.transpose(0, 1))
        row += len(decoded)
    return rows


def _lines_per_row(parcel: Parcel, attached: Attached) -> int:
    stored: torch.dtype = getattr(torch, parcel.dtype)
    kept: torch.dtype = getattr(torch, attached.dtype)
    return -(-stored.itemsize // kept.itemsize)


def _records(page: torch.Tensor, parcel: Parcel, attached: Attached) -> int:
    return len(page) // (len(parcel.points) * _lines_per_row(parcel, attached))


def _filled(parcel: Parcel, attached: Attached) -> Iterator[tuple[int, int]]:
    record = len(parcel.points) * _lines_per_row(parcel, attached)
    left = parcel.stored_rows
    for first in parcel.pages:
        records = min(left, attached.page_lines // record)
        if records <= 0:
            return
        left -= records
        yield first, records * record
