"""Four bits per element on CUDA: rows of the ring as codes behind the scales and zero points of their groups.

One program per row. The formula is that of `kernels.codecs.int4`. Shape legend: records = tokens of a pass of one
layout; points = its points with equal schemas; line = elements of a line of the ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8

from steercap.kernels.bits import GROUP, INT4_STEPS
from steercap.kernels.triton_uniform import all_finite, launch_rows, lift_of, nearest, step_of, steps_from

_GROUP, _STEPS = tl.constexpr(GROUP), tl.constexpr(INT4_STEPS)


@triton.jit
def _int4_kernel(
    rows, codes, heads, records, points,
    WIDTH: tl.constexpr, ROW_LINE: tl.constexpr, BYTE_LINE: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    record = records + tl.program_id(0) * 2
    point = points + tl.program_id(1) * 2
    groups = tl.arange(0, BLOCK_GROUPS)
    columns = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = columns < WIDTH
    row = tl.load(rows + (tl.load(record) + tl.load(point)) * ROW_LINE + columns, mask=inside, other=0.0).to(tl.float32)
    here = groups * _GROUP < WIDTH
    least = tl.where(here, tl.min(tl.where(inside, row, float("inf")), 1), 0.0)
    most = tl.where(here, tl.max(tl.where(inside, row, float("-inf")), 1), 0.0)
    finite = all_finite(row, inside, 1)
    scale = step_of(least, most, _STEPS)
    lift = lift_of(tl.maximum(tl.abs(least), tl.abs(most)))
    code = nearest(steps_from(row, least[:, None], scale[:, None], lift[:, None]))
    code = tl.where(finite[:, None] & inside, tl.minimum(tl.maximum(code, 0.0), _STEPS), 0.0).to(tl.int32)
    # The later of two elements goes in the upper half of their byte.
    places = 1 + 15 * tl.arange(0, 2)
    packed = tl.sum(tl.reshape(code, (BLOCK_GROUPS, _GROUP // 2, 2)) * places[None, None, :], 2)
    bytes_ = groups[:, None] * (_GROUP // 2) + tl.arange(0, _GROUP // 2)[None, :]
    start = tl.load(record + 1) * BYTE_LINE + tl.load(point + 1)
    count: tl.constexpr = (WIDTH + _GROUP - 1) // _GROUP
    tl.store(codes + start + 8 * count + bytes_, packed.to(tl.uint8), mask=bytes_ * 2 < WIDTH)
    tl.store(heads + start // 4 + 2 * groups, tl.where(finite, scale, float("nan")), mask=here)
    tl.store(heads + start // 4 + 2 * groups + 1, least, mask=here)


def launch_int4(
    rows: Float[torch.Tensor, "lines line"],
    ring: UInt8[torch.Tensor, "lines bytes"],
    records: Int[torch.Tensor, "records 2"],
    points: Int[torch.Tensor, "points 2"],
    width: int,
) -> None:
    """Encode rows of the ring, and write the codes to other lines of it; arguments are those of `launch_full8`."""
    groups = triton.next_power_of_2(triton.cdiv(width, GROUP))
    launch_rows(_int4_kernel, rows, ring, records, points, width=width, block=groups * GROUP, BLOCK_GROUPS=groups)
