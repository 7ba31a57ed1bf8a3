"""Triton kernels of uniform quantisation on CUDA: the arithmetic of `kernels.codecs.uniform`, and codecs.

Scales and values are tensors of any shape; `axis` is the one that a scale covers. A codec has one program per row, and
the formula of its module in `kernels.codecs`. In `topk8` the smallest stored magnitude is found bit by bit, by
counting: the bits of positive floats have the same order as the floats.

Shape legend: records = tokens of a pass with one layout of records; points = captured points with equal schemas; line =
elements of a ring line.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8

from steercap.kernels.bits import FULL8_HEAD, FULL8_STEPS, GROUP, INT4_STEPS, TOPK8_HEAD

#: Number of elements of a row per warp.
WARP_ELEMENTS: Final = 1024

#: Numbers below the first are multiplied by the second before any arithmetic.
_SMALL, _LIFT = tl.constexpr(2.0**-90), tl.constexpr(2.0**100)


@triton.jit
def step_of(least, most, STEPS: tl.constexpr):
    """Return `(most - least) / STEPS` as float32, rounded up where STEPS steps would not reach `most`."""
    spread = most.to(tl.float64) - least.to(tl.float64)
    step = (spread / STEPS).to(tl.float32)
    larger = (step.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(step.to(tl.float64) * STEPS < spread, larger, step)  # so that no code is beyond the last


@triton.jit
def lift_of(magnitude):
    """Return a power of two by which to scale numbers up to `magnitude` before subtracting and dividing them.

    With it, no difference overflows, and no denormal number is lost.
    """
    return tl.where(magnitude < _SMALL, _LIFT, 0.5)


@triton.jit
def steps_from(values, zero, scale, lift):
    """Return `(values - zero) / scale`, computed with numbers times `lift`; 0 where `scale` is 0."""
    return tl.where(scale > 0, (values * lift - zero * lift) / tl.where(scale > 0, scale * lift, 1.0), 0.0)


@triton.jit
def nearest(steps):
    """Round numbers below 2^22 to the nearest integer, ties to even."""
    return (steps + 12582912.0) - 12582912.0


@triton.jit
def all_finite(values, inside, axis: tl.constexpr):
    """Check if all numbers along an axis, where `inside` is True, are finite."""
    odd = inside & ((values != values) | (tl.abs(values) == float("inf")))
    return tl.sum(odd.to(tl.int32), axis) == 0


def launch_rows(
    kernel: Any,
    rows: torch.Tensor,
    ring: torch.Tensor,
    records: torch.Tensor,
    points: torch.Tensor,
    *,
    width: int,
    block: int,
    **more: Any,
) -> None:
    """Launch the kernel of a codec, with one program per record and point.

    Args:
        kernel: kernel with the parameters `rows, codes, heads, records, points` and constants of their layout.
        rows, ring, records, points, width: as for `launch_full8`.
        block: number of elements that a program handles.
        **more: further arguments of the kernel.
    """
    kernel[(len(records), len(points))](
        rows,
        ring,
        ring.view(torch.float32),
        records,
        points,
        WIDTH=width,
        ROW_LINE=rows.shape[1],
        BYTE_LINE=ring.shape[1],
        num_warps=min(max(block // WARP_ELEMENTS, 1), 16),
        **more,
    )


_FULL8_HEAD, _FULL8_STEPS = tl.constexpr(FULL8_HEAD), tl.constexpr(FULL8_STEPS)


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
    scale = step_of(least, most, _FULL8_STEPS)
    code = nearest(steps_from(row, least, scale, lift_of(tl.maximum(tl.abs(least), tl.abs(most)))))
    code = tl.where(finite & inside, tl.minimum(tl.maximum(code, 0.0), _FULL8_STEPS), 0.0)
    start = tl.load(record + 1) * BYTE_LINE + tl.load(point + 1)
    tl.store(codes + start + _FULL8_HEAD + columns, code.to(tl.uint8), mask=inside)
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
    """Encode rows of the ring buffer as `full8`, calibrated or not, into other lines of the ring.

    Args:
        rows: the ring, viewed in the points' dtype.
        ring: the ring, viewed as bytes.
        records: first line of each token's raw record, and of its encoded record, int64.
        points: line offset of each point's row in a raw record, and byte offset in an encoded record, int64.
        width: number of elements of a row.
        bank: the vector bank, float32, cut to the width; None without calibration.
        bank_rows: bank rows of each point's centre and reach, int64; None without calibration.
    """
    block, calibrated = triton.next_power_of_2(width), bank is not None
    more: dict[str, Any] = {"bank": bank if calibrated else rows, "bank_rows": bank_rows if calibrated else records}
    more |= {"BLOCK": block, "BANK": 0 if bank is None else bank.stride(0), "CALIBRATED": calibrated}
    launch_rows(_full8_kernel, rows, ring, records, points, width=width, block=block, **more)


_GROUP, _INT4_STEPS = tl.constexpr(GROUP), tl.constexpr(INT4_STEPS)


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
    scale = step_of(least, most, _INT4_STEPS)
    lift = lift_of(tl.maximum(tl.abs(least), tl.abs(most)))
    code = nearest(steps_from(row, least[:, None], scale[:, None], lift[:, None]))
    code = tl.where(finite[:, None] & inside, tl.minimum(tl.maximum(code, 0.0), _INT4_STEPS), 0.0).to(tl.int32)
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
    """Encode rows of the ring buffer as `int4` into other lines of the ring; arguments as of `launch_full8`."""
    groups = triton.next_power_of_2(triton.cdiv(width, GROUP))
    launch_rows(_int4_kernel, rows, ring, records, points, width=width, block=groups * GROUP, BLOCK_GROUPS=groups)


_TOPK8_HEAD = tl.constexpr(TOPK8_HEAD)
#: Number of low bits that are zero in a float32 converted from a dtype.
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
    scale = step_of(least, most, _FULL8_STEPS)
    code = nearest(steps_from(row, least, scale, lift_of(tl.maximum(tl.abs(least), tl.abs(most)))))
    code = tl.where(finite, tl.minimum(tl.maximum(code, 0.0), _FULL8_STEPS), 0.0)
    start = tl.load(record + 1) * BYTE_LINE + tl.load(point + 1)
    tl.store(indices + (start + _TOPK8_HEAD) // 2 + place, columns.to(tl.uint16), mask=kept)
    tl.store(codes + start + _TOPK8_HEAD + 2 * KEPT + place, code.to(tl.uint8), mask=kept)
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
    """Encode rows of the ring buffer as `topk8` into other lines of the ring.

    Args:
        rows, ring, records, points, width: as for `launch_full8`.
        kept: number of elements stored of each row.
    """
    block = triton.next_power_of_2(width)
    indices, idle = ring.view(torch.uint16), IDLE_BITS[rows.dtype]
    more = {"indices": indices, "KEPT": kept, "BLOCK": block, "IDLE": idle}
    launch_rows(_topk8_kernel, rows, ring, records, points, width=width, block=block, **more)
