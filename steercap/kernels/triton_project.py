"""Projections on CUDA: what rows of the ring are along the directions of their layer, one program a row.

Number 6 in the life of a request. Shape legend: records = tokens of a pass whose rows are projected on the same
directions; points = rows of a record, one behind the other; width = elements of a row.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from jaxtyping import Float, Int

from steercap.core.rows import Ints


@triton.jit  # type: ignore[untyped-decorator]
def _project_kernel(  # type: ignore[no-untyped-def]
    rows, results, bank, places, table, directions, WIDTH: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr
):
    record = tl.program_id(0).to(tl.int64)
    point = tl.program_id(1)
    source = tl.load(table + record * 2) + point
    target = tl.load(table + record * 2 + 1)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(rows + source * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    for direction in range(directions):
        place = tl.load(places + point * directions + direction)
        vector = tl.load(bank + place * WIDTH + columns, mask=inside, other=0.0)
        along = tl.sum(row * vector, axis=0)
        tl.store(results + target * LINE + point * directions + direction, along)


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
    width = rows.shape[1]
    line = width * rows.itemsize // 4
    block = triton.next_power_of_2(width)
    _project_kernel[(len(table), points)](
        rows,
        rows.view(torch.float32) if rows.dtype != torch.float32 else rows,
        bank,
        places,
        table,
        directions,
        WIDTH=width,
        LINE=line,
        BLOCK=block,
        num_warps=8 if block > 2048 else 4,
    )


def targets_of(first: int, stored: Ints) -> Ints:
    """First line of each record's results, one behind the other from `first` on: int64 [records]."""
    ends: Ints = stored.cumsum()
    lines: Ints = first + ends - stored
    return lines
