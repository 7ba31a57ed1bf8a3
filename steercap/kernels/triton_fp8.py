"""Eight-bit floating point on CUDA: rows of the ring as e4m3 codes behind their scale.

One program per row. The formula is that of `kernels.codecs.fp8`; the bits of e4m3 are assembled as integers, which
every device supports. Shape legend: records = tokens of a pass of one layout; points = its points with equal schemas;
line = elements of a line of the ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8

from steercap.kernels.bits import FP8_HEAD, FP8_MOST
from steercap.kernels.triton_uniform import all_finite, launch_rows, lift_of, nearest, step_of, steps_from

_HEAD, _MOST = tl.constexpr(FP8_HEAD), tl.constexpr(FP8_MOST)


@triton.jit
def _fp8_kernel(
    rows, codes, heads, records, points,
    WIDTH: tl.constexpr, ROW_LINE: tl.constexpr, BYTE_LINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    record = records + tl.program_id(0) * 2
    point = points + tl.program_id(1) * 2
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(rows + (tl.load(record) + tl.load(point)) * ROW_LINE + columns, mask=inside, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(row), 0)
    finite = all_finite(row, inside, 0)
    scale = step_of(most * 0.0, most, _MOST)
    size = tl.minimum(tl.abs(steps_from(row, 0.0, scale, lift_of(most))), _MOST)
    # The exponent as e4m3 has it, -6 for what is denormal there; three bits of mantissa behind the leading one.
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    unit = ((127 + 3 - exponent) << 23).to(tl.float32, bitcast=True)
    code = (exponent + 6) * 8 + nearest(size * unit).to(tl.int32)
    code = tl.where(row < 0, code + 128, code)
    start = tl.load(record + 1) * BYTE_LINE + tl.load(point + 1)
    tl.store(codes + start + _HEAD + columns, tl.where(finite, code, 0).to(tl.uint8), mask=inside)
    tl.store(heads + start // 4, tl.where(finite, scale, float("nan")))


def launch_fp8(
    rows: Float[torch.Tensor, "lines line"],
    ring: UInt8[torch.Tensor, "lines bytes"],
    records: Int[torch.Tensor, "records 2"],
    points: Int[torch.Tensor, "points 2"],
    width: int,
) -> None:
    """Encode rows of the ring, and write the codes to other lines of it; arguments are those of `launch_full8`."""
    block = triton.next_power_of_2(width)
    launch_rows(_fp8_kernel, rows, ring, records, points, width=width, block=block, BLOCK=block)
