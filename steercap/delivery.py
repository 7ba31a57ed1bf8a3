"""One finished request's rows, read out of the arenas of the workers that have them.

Number 8 in the life of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from steercap.core.messages import Attached, Parcel, Unknown
from steercap.errors import CaptureIncomplete
from steercap.transport.assemble import assemble
from steercap.transport.reader import LineReader

#: Bytes above which rows are gathered on a thread, so that the event loop goes on.
THREAD_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Rank:
    """A worker that captures: what it holds, and how its lines are read."""

    index: int
    attached: Attached
    reader: LineReader


@dataclass(frozen=True)
class Delivery:
    """One request's rows, or why they cannot be had.

    Args:
        parcels: one a capturing worker that holds points of the request.
        rows: rows [points, rows, width] of each parcel.
        failure: what a worker said went wrong, or None.
    """

    parcels: tuple[Parcel, ...]
    rows: tuple[torch.Tensor, ...]
    failure: str | None


async def deliver(ranks: Sequence[Rank], found: Sequence[Parcel | Unknown]) -> Delivery:
    """Read one request's rows out of each worker's arena.

    Args:
        ranks: the workers that capture.
        found: what each of them says of the request.
    """
    parcels, rows, failure = [], [], None
    for rank, parcel in zip(ranks, found, strict=True):
        if isinstance(parcel, Unknown):
            failure = failure or f"worker {rank.index} has no rows of this request"
            continue
        failure = failure or parcel.failure
        if failure is None and parcel.points:
            try:
                rows.append(await _gather(rank, parcel))
            except CaptureIncomplete as error:
                failure = str(error)
            parcels.append(parcel)
    return Delivery(tuple(parcels), tuple(rows), failure)


async def _gather(rank: Rank, parcel: Parcel) -> torch.Tensor:
    lines = await rank.reader.read(parcel.lines)
    if sum(page.numel() for page in lines) < THREAD_BYTES:
        return assemble(parcel, rank.attached.width, lines)
    return await asyncio.to_thread(assemble, parcel, rank.attached.width, lines)
