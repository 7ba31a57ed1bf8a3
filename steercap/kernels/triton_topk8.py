"""Greatest elements on CUDA: rows of the ring as indices and codes behind their scale, zero point, least magnitude.

One program per row. The formula is that of `kernels.codecs.topk8`. The magnitude of the last element kept is found bit
by bit, by counting: the bits of positive floats order as the floats do. Shape legend: records = tokens of a pass of
one layout; points = its points with equal schemas; line = elements of a line of the ring.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8

from steercap.kernels.bits import FULL8_STEPS, TOPK8_HEAD
from steercap.kernels.triton_uniform import all_finite, launch_rows, lift_of, nearest, step_of, steps_from

_HEAD, _STEPS = tl.constexpr(TOPK8_HEAD), tl.constexpr(FULL8_STEPS)
#: Low bits of a float32 that are zero in every number of a dtype.
IDLE_BITS: Final = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _topk8_kernel(
    rows, codes, heads, records, points, indices,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, ROW_LINE: tl.constexpr, BYTE_LINE: tl.constexpr, BLOCK: tl.constexpr,
    IDLE: tl.constexpr,
):  # fmt: skip
    record = records + tl.program_id(0) * 2
    point = points + tl.program_id(1) * 2
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(rows + (tl.load(record) + tl.load(point)) * ROW_LINE + columns, mask=inside, other=0.0).to(tl.float32)
    finite = all_finite(row, inside, 0)
    size = tl.where(inside, tl.abs(row).to(tl.int32, bitcast=True), -1)
    last = tl.zeros((), tl.int32)
    for bit in range(31 - IDLE):
        higher = last + (1 << (30 - bit))
        last = tl.where(tl.sum((size >= higher).to(tl.int32), 0) >= KEPT, higher, last)
    above, level = size > last, size == last
    room = KEPT - tl.sum(above.to(tl.int32), 0)
    kept = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    least = tl.min(tl.where(kept, row, float("inf")), 0)
    most = tl.max(tl.where(kept, row, float("-inf")), 0)
    scale = step_of(least, most, _STEPS)
    code = nearest(steps_from(row, least, scale, lift_of(tl.maximum(tl.abs(least), tl.abs(most)))))
    code = tl.where(finite, tl.minimum(tl.maximum(code, 0.0), _STEPS), 0.0)
    start = tl.load(record + 1) * BYTE_LINE + tl.load(point + 1)
    tl.store(indices + (start + _HEAD) // 2 + place, columns.to(tl.uint16), mask=kept)
    tl.store(codes + start + _HEAD + 2 * KEPT + place, code.to(tl.uint8), mask=kept)
    tl.store(heads + start // 4, tl.where(finite, scale, float("nan")))
    tl.store(heads + start // 4 + 1, least)
    tl.store(heads + start // 4 + 2, last.to(tl.float32, bitcast=True))


def launch_topk8(
    rows: Float[torch.Tensor, "lines line"],
    ring: UInt8[torch.Tensor, "lines bytes"],
    records: Int[torch.Tensor, "records 2"],
    points: Int[torch.Tensor, "points 2"],
    width: int,
    kept: int,
) -> None:
    """Encode rows of the ring, and write the codes to other lines of it.

    Args:
        rows, ring, records, points, width: as for `launch_full8`.
        kept: number of elements kept of each row.
    """
    block = triton.next_power_of_2(width)
    indices, idle = ring.view(torch.uint16), IDLE_BITS[rows.dtype]
    more = {"indices": indices, "KEPT": kept, "BLOCK": block, "IDLE": idle}
    launch_rows(_topk8_kernel, rows, ring, records, points, width=width, block=block, **more)
