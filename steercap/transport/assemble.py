"""From pages of records to one tensor a point.

Number 8 in the life of a request. Shape legend: record = one token's lines, one a point; page = whole records.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steercap.codecs import CODECS
from steercap.core.messages import Parcel
from steercap.errors import CaptureIncomplete


def assemble(parcel: Parcel, width: int, lines: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gather the records of a parcel.

    Args:
        parcel: what the lines hold.
        width: elements of a row.
        lines: the parcel's line ranges, uint8 [lines, line bytes] each.

    Returns:
        The rows of every point, in memory of their own: [points, rows, width], dtype of the parcel.

    Raises:
        CaptureIncomplete: the lines do not hold as many records as the parcel says.
    """
    dtype: torch.dtype = getattr(torch, parcel.dtype)
    codec = CODECS[parcel.codec]
    points = len(parcel.points)
    rows = torch.empty((points, parcel.stored_rows, width), dtype=dtype)
    record_bytes = sum(page.numel() for page in lines) // max(parcel.stored_rows, 1)
    row = 0
    for page in lines:
        records = page.reshape(-1, points, record_bytes // points)
        rows[:, row : row + len(records)].copy_(codec.decode(records, dtype, width).transpose(0, 1))
        row += len(records)
    if row != parcel.stored_rows:
        raise CaptureIncomplete(f"{parcel.owner.key}: {parcel.stored_rows} records expected, the lines hold {row}")
    return rows
