"""Projections on CUDA: what rows of the ring are along the directions of their layer.

Number 6 in the life of a request. One program a row; in a large pass a few rows of one point, which then share each
direction. Shape legend: records = tokens of a pass whose rows are projected on the same
directions; points = rows of a record, one behind the other; width = elements of a row.
"""

from __future__ import annotations

from typing import Final

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from jaxtyping import Float, Int

from steercap.core.rows import Ints

#: In passes of more records than this, a program takes TOGETHER of them.
LARGE: Final = 512
TOGETHER: Final = 4
#: Elements of rows that one warp has in registers, 32 threads of 64.
WARP_ELEMENTS: Final = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _project_kernel(  # type: ignore[no-untyped-def]
    rows, results, bank, places, table, count, directions, WIDTH, LINE, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):
    records = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    point = tl.program_id(1)
    there = records < count
    sources = tl.load(table + records * 2, mask=there, other=0) + point
    targets = tl.load(table + records * 2 + 1, mask=there, other=0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    tile = tl.load(rows + sources[:, None] * WIDTH + columns, mask=there[:, None] & inside, other=0.0).to(tl.float32)
    for direction in range(directions):
        place = tl.load(places + point * directions + direction)
        vector = tl.load(bank + place * WIDTH + columns, mask=inside, other=0.0)
        along = tl.sum(tile * vector[None, :], axis=1)
        tl.store(results + targets * LINE + point * directions + direction, along, mask=there)


def launch_project(
    rows: Float[torch.Tensor, "lines width"],
    bank: Float[torch.Tensor, "vectors width"],
    places: Int[torch.Tensor, "points directions"],
    table: Int[torch.Tensor, "records 2"],
) -> None:
    """Write what records of rows are along their directions into lines of the ring.

    Args:
        rows: the ring: records of one line a point, and lines for the float32 results, point by point.
        bank: float32 vectors.
        places: rows of the bank, int64.
        table: first line of each record, and of its results, int64.
    """
    points, directions = places.shape
    width, count = rows.shape[1], len(table)
    together = TOGETHER if count > LARGE else 1
    block = triton.next_power_of_2(width)
    _project_kernel[(triton.cdiv(count, together), points)](
        rows,
        rows.view(torch.float32),
        bank,
        places,
        table,
        count,
        directions,
        WIDTH=width,
        LINE=width * rows.itemsize // torch.float32.itemsize,
        BLOCK=block,
        TOKENS=together,
        num_warps=min(max(block * together // WARP_ELEMENTS, 4), 16),
    )


def targets_of(first: int, stored: Ints) -> Ints:
    """First line of each record's results, one behind the other from `first` on: int64 [records]."""
    ends: Ints = stored.cumsum()
    lines: Ints = first + ends - stored
    return lines
