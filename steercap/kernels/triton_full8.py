"""Eight bits per element on CUDA: rows of the ring as codes behind their scale and zero point.

One program per row. The formula is that of `kernels.codecs.full8`, or of `kernels.codecs.calibrated8`.
Shape legend: records = tokens of a pass of one layout; points = its points with equal schemas; line = elements of a
line of the ring.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8

from steercap.kernels.bits import FULL8_HEAD, FULL8_STEPS
from steercap.kernels.triton_uniform import all_finite, launch_rows, lift_of, nearest, step_of, steps_from

_HEAD, _STEPS = tl.constexpr(FULL8_HEAD), tl.constexpr(FULL8_STEPS)


@triton.jit
def _full8_kernel(
    rows, codes, heads, records, points, bank, bank_rows,
    WIDTH: tl.constexpr, ROW_LINE: tl.constexpr, BYTE_LINE: tl.constexpr, BLOCK: tl.constexpr, BANK: tl.constexpr,
    CALIBRATED: tl.constexpr,
):  # fmt: skip
    record = records + tl.program_id(0) * 2
    point = points + tl.program_id(1) * 2
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(rows + (tl.load(record) + tl.load(point)) * ROW_LINE + columns, mask=inside, other=0.0).to(tl.float32)
    if CALIBRATED:
        own = bank_rows + tl.program_id(1) * 2
        centre = tl.load(bank + tl.load(own) * BANK + columns, mask=inside, other=0.0)
        reach = tl.load(bank + tl.load(own + 1) * BANK + columns, mask=inside, other=1.0)
        row = tl.div_rn(row - centre, reach)
    least = tl.min(tl.where(inside, row, float("inf")), 0)
    most = tl.max(tl.where(inside, row, float("-inf")), 0)
    finite = all_finite(row, inside, 0)
    scale = step_of(least, most, _STEPS)
    code = nearest(steps_from(row, least, scale, lift_of(tl.maximum(tl.abs(least), tl.abs(most)))))
    code = tl.where(finite & inside, tl.minimum(tl.maximum(code, 0.0), _STEPS), 0.0)
    start = tl.load(record + 1) * BYTE_LINE + tl.load(point + 1)
    tl.store(codes + start + _HEAD + columns, code.to(tl.uint8), mask=inside)
    tl.store(heads + start // 4, tl.where(finite, scale, float("nan")))
    tl.store(heads + start // 4 + 1, least)


def launch_full8(
    rows: Float[torch.Tensor, "lines line"],
    ring: UInt8[torch.Tensor, "lines bytes"],
    records: Int[torch.Tensor, "records 2"],
    points: Int[torch.Tensor, "points 2"],
    width: int,
    bank: Float[torch.Tensor, "vectors width"] | None = None,
    bank_rows: Int[torch.Tensor, "points 2"] | None = None,
) -> None:
    """Encode rows of the ring, and write the codes to other lines of it.

    Args:
        rows: the ring, in the dtype of the points.
        ring: the ring, as bytes.
        records: first line of each raw record, and of its stored record, int64.
        points: line of each point's row in a raw record, and byte of its codes in a stored record, int64.
        width: elements of a row.
        bank: float32 vectors of calibrated rows, a view that may be narrower than the bank; None without calibration.
        bank_rows: bank rows of the centre and the reach of each point, int64.
    """
    block, calibrated = triton.next_power_of_2(width), bank is not None
    more: dict[str, Any] = {"bank": bank if calibrated else rows, "bank_rows": bank_rows if calibrated else records}
    more |= {"BLOCK": block, "BANK": 0 if bank is None else bank.stride(0), "CALIBRATED": calibrated}
    launch_rows(_full8_kernel, rows, ring, records, points, width=width, block=block, **more)
