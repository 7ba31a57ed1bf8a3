"""Random projections on CUDA: rows of the ring times a matrix of signs, as codes behind the scales of their groups.

A program takes a tile of rows of one point, and a group of their numbers: a matrix product in the rows' own dtype, in
which 1 and -1 are exact, added up in float32. The formula is that of `kernels.codecs.random_projection`. Shape
legend: records = tokens of a pass of one layout; points = its points with equal schemas; line = elements of a line of
the ring; k = numbers of a row.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int

from steercap.kernels.bits import GROUP
from steercap.kernels.triton_uniform import all_finite, lift_of, nearest, step_of, steps_from

#: Rows of a tile, for passes of few records and of many; and elements of a row at a time, by bytes of an element.
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
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, _GROUP), tl.float32)
    for first in range(0, WIDTH, DEPTH):
        columns = first + depth
        inside = columns < WIDTH
        tile = tl.load(rows + sources[:, None] + columns[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        signs = tl.load(
            matrix + kept[None, :] * WIDTH + columns[:, None], mask=(kept < K)[None, :] & inside[:, None], other=0.0
        )
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
    """Project and encode rows of the ring, and write the codes to other lines of it.

    Args:
        rows: the ring, in the dtype of the points.
        codes: the ring, as codes: int8 or int16.
        records, points: as for `launch_full8`.
        matrix: the signs, in the dtype of the points, contiguous.
        steps: greatest code.
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
