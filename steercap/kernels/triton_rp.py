"""Triton kernels of encodings on CUDA: 8-bit floats, random projections, and projections on a point's directions.

The formulas are those of `kernels.codecs.floats` and `random_projection`. The bits of e4m3 are assembled as
integers, which every device supports. A program of random projection computes a group of numbers for a tile of rows of
one point, as a matrix product in the rows' own dtype, in which 1 and -1 are exact, accumulated in float32. The others
have one program per row; in a large pass, a program of projections has a few rows of one point, which share the loaded
directions.

Shape legend: records = tokens of a pass with one layout of records; points = captured points with equal schemas; width
= elements of a row; line = elements of a ring line; k = numbers per row.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8

from steercap.kernels.bits import FP8_HEAD, FP8_MOST, GROUP
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
    """Encode rows of the ring buffer as `fp8` into other lines of the ring; arguments as of `launch_full8`."""
    block = triton.next_power_of_2(width)
    launch_rows(_fp8_kernel, rows, ring, records, points, width=width, block=block, BLOCK=block)


#: Rows of a tile, in passes of few records and of many; and elements of a row loaded at a time, by element size.
FEW, MANY = 16, 64
DEPTHS: Final = {2: 64, 4: 32}

_GROUP = tl.constexpr(GROUP)


@triton.jit
def _rp_kernel(
    rows, codes, heads, records, points, count, matrix, K, FACTOR,
    WIDTH: tl.constexpr, ROW_LINE: tl.constexpr, CODE_LINE: tl.constexpr, CODE_BYTES: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    numbers = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    point = points + tl.program_id(2) * 2
    there = numbers < count
    sources = (tl.load(records + numbers * 2, mask=there, other=0) + tl.load(point)) * ROW_LINE
    kept = group * _GROUP + tl.arange(0, _GROUP)
    signs_of = matrix + kept.to(tl.int64) * WIDTH
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, _GROUP), tl.float32)
    for first in range(0, WIDTH, DEPTH):
        columns = first + depth
        inside = columns < WIDTH
        tile = tl.load(rows + sources[:, None] + columns[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        signs = tl.load(signs_of[None, :] + columns[:, None], mask=(kept < K)[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(tile, signs, sums, input_precision="ieee")
    values = sums * FACTOR
    counted = (kept < K)[None, :] & there[:, None]
    finite = all_finite(values, counted, 1)
    values = tl.where(finite[:, None], values, 0.0)
    most = tl.max(tl.abs(values), 1)
    scale = step_of(most * 0.0, most, STEPS)
    code = nearest(steps_from(values, 0.0, scale[:, None], lift_of(most)[:, None]))
    code = tl.where(finite[:, None], tl.minimum(tl.maximum(code, -STEPS), STEPS), 0.0).to(tl.int32)
    targets = tl.load(records + numbers * 2 + 1, mask=there, other=0) * CODE_LINE + tl.load(point + 1) // CODE_BYTES
    groups = (K + _GROUP - 1) // _GROUP
    place = targets[:, None] + groups * (4 // CODE_BYTES) + kept[None, :]
    tl.store(codes + place, code.to(codes.dtype.element_ty), mask=counted)
    tl.store(heads + targets // (4 // CODE_BYTES) + group, tl.where(finite, scale, float("nan")), mask=there)


def launch_rp(
    rows: Float[torch.Tensor, "lines line"],
    codes: Int[torch.Tensor, "lines codes"],
    records: Int[torch.Tensor, "records 2"],
    points: Int[torch.Tensor, "points 2"],
    matrix: Float[torch.Tensor, "k width"],
    steps: int,
) -> None:
    """Encode rows of the ring buffer as random projections into other lines of the ring.

    Args:
        rows: the ring, viewed in the points' dtype.
        codes: the ring, viewed in the codes' dtype, int8 or int16.
        records, points: as for `launch_full8`.
        matrix: the signs, 1 or -1, in the points' dtype, contiguous.
        steps: maximum code.
    """
    k, width = matrix.shape
    tile = FEW if len(records) <= FEW else MANY
    _rp_kernel[(triton.cdiv(k, GROUP), triton.cdiv(len(records), tile), len(points))](
        rows,
        codes,
        codes.view(torch.float32),
        records,
        points,
        len(records),
        matrix,
        k,
        k**-0.5,
        WIDTH=width,
        ROW_LINE=rows.shape[1],
        CODE_LINE=codes.shape[1],
        CODE_BYTES=codes.itemsize,
        STEPS=steps,
        ROWS=tile,
        DEPTH=DEPTHS[rows.itemsize],
        num_warps=4,
        num_stages=3,
    )


#: Number of records of a pass above which a program handles `TOGETHER` of them.
LARGE: Final = 512
TOGETHER: Final = 4
#: Number of elements of rows per warp, 64 for each of 32 threads.
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
    """Project rows of the ring buffer on their point's directions, into other lines of the ring.

    Args:
        rows: the ring, viewed in the points' dtype.
        results: the ring, viewed as float32.
        records: first line of each token's raw record, and of its encoded record, int64.
        points: line offset of each point's row in a raw record, and byte offset in an encoded record, int64.
        width: number of elements of a row.
        bank: the vector bank, float32, cut to the width.
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
