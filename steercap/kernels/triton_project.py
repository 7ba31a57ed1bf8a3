"""Projections on CUDA: scalar products of rows of the ring with the directions of their point.

One program per row; in a large pass a few rows of one point, which then share each direction. Shape legend: records =
tokens of a pass of one layout; points = its points with equal schemas; width = elements of a row; line = elements
of a line of the ring.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int

#: In passes of more records than this, a program handles TOGETHER of them.
LARGE: Final = 512
TOGETHER: Final = 4
#: Elements of rows that one warp holds in registers, 32 threads of 64.
WARP_ELEMENTS: Final = 2048


@triton.jit
def _project_kernel(
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
    """Project rows of the ring on their point's directions, and write the results to other lines of the ring.

    Args:
        rows: the ring, in the dtype of the points.
        results: the ring, as float32.
        records: first line of each raw record, and of its stored record, int64.
        points: line of each point's row in a raw record, and byte of its numbers in a stored record, int64.
        width: elements of a row.
        bank: float32 vectors, a view that may be narrower than the bank.
        bank_rows: bank rows of each point's directions, int64.
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
