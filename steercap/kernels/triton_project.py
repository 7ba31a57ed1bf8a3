"""Projections on CUDA: what rows of the ring are along the directions of their point.

One program per row; in a large pass a few rows of one point, which then share each direction. Shape legend: records =
tokens of a pass of one layout; points = points of it whose rows are alike; width = elements of a row; line = elements
of a line of the ring.
"""

from __future__ import annotations

from typing import Final

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from jaxtyping import Float, Int

#: In passes of more records than this, a program takes TOGETHER of them.
LARGE: Final = 512
TOGETHER: Final = 4
#: Elements of rows that one warp has in registers, 32 threads of 64.
WARP_ELEMENTS: Final = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _project_kernel(  # type: ignore[no-untyped-def]
    rows, results, bank, bank_rows, records, points, count, directions,
    WIDTH, ROW_LINE, RESULT_LINE, BANK, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    numbers = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    point = tl.program_id(1)
    there = numbers < count
    sources = tl.load(records + numbers * 2, mask=there, other=0)
    targets = tl.load(records + numbers * 2 + 1, mask=there, other=0)
    offset = tl.load(points + point * 2)
    target = results + targets * RESULT_LINE + tl.load(points + point * 2 + 1) // 4
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = (sources + offset) * ROW_LINE
    tile = tl.load(rows + start[:, None] + columns, mask=there[:, None] & inside, other=0.0).to(tl.float32)
    for direction in range(directions):
        bank_row = tl.load(bank_rows + point * directions + direction)
        vector = tl.load(bank + bank_row * BANK + columns, mask=inside, other=0.0)
        along = tl.sum(tile * vector[None, :], axis=1)
        tl.store(target + direction, along, mask=there)


def launch_project(
    rows: Float[torch.Tensor, "lines line"],
    results: Float[torch.Tensor, "lines floats"],
    records: Int[torch.Tensor, "records 2"],
    points: Int[torch.Tensor, "points 2"],
    width: int,
    bank: Float[torch.Tensor, "vectors width"],
    bank_rows: Int[torch.Tensor, "points directions"],
) -> None:
    """Write what records of rows are along their directions into lines of the ring.

    Args:
        rows: the ring, in the dtype of the points.
        results: the ring, as float32.
        records: first line of each record, and of what is stored of it, int64.
        points: line of each point's row in a record, and byte of its numbers in what is stored, int64.
        width: elements of a row.
        bank: float32 vectors, a view of rows that may be wider.
        bank_rows: rows of the bank, int64.
    """
    count, directions = len(records), bank_rows.shape[1]
    together = TOGETHER if count > LARGE else 1
    block = triton.next_power_of_2(width)
    _project_kernel[(triton.cdiv(count, together), len(points))](
        rows,
        results,
        bank,
        bank_rows,
        records,
        points,
        count,
        directions,
        WIDTH=width,
        ROW_LINE=rows.shape[1],
        RESULT_LINE=results.shape[1],
        BANK=bank.stride(0),
        BLOCK=block,
        TOKENS=together,
        num_warps=min(max(block * together // WARP_ELEMENTS, 4), 16),
    )
