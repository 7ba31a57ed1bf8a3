"""Triton kernel that updates running reductions of requests with the rows of a pass.

One program per request, point and block of the row's elements. It adds the rows that were kept apart for the request,
then the rows of this pass in order, so that equal passes give bit-identical sums; then it keeps the newest rows apart.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int

from steercap.kernels import bits

#: Columns of an update, int32; after them, for each slot of kept rows, a slot to add, then a line to keep; -1 for none.
#: LINE is the first line of the first record, and a record is RECORD lines of the ring. Without a layout, nothing is
#: read from the ring, and all points are updated.
UPDATE_COLUMNS: Final = 8
ACCUMULATOR, KIND, FRESH, LAYOUT, RECORD, LINE, COUNT, DIVISOR = range(UPDATE_COLUMNS)
#: Columns of a point, int32: index, and offsets of its row in an accumulator and in a kept record, in elements.
POINT_COLUMNS: Final = 3
NUMBER, SUM_AT, HELD_AT = range(POINT_COLUMNS)
#: Numbers of a row's elements, and of rows, that one program has in registers.
BLOCK, TILE = 1024, 8

_UPDATE_COLUMNS = tl.constexpr(UPDATE_COLUMNS)
_ACCUMULATOR, _KIND, _FRESH = tl.constexpr(ACCUMULATOR), tl.constexpr(KIND), tl.constexpr(FRESH)
_RECORD, _LINE, _COUNT = tl.constexpr(RECORD), tl.constexpr(LINE), tl.constexpr(COUNT)
_LAYOUT, _POINT_COLUMNS = tl.constexpr(LAYOUT), tl.constexpr(POINT_COLUMNS)
_NUMBER, _SUM_AT, _HELD_AT = tl.constexpr(NUMBER), tl.constexpr(SUM_AT), tl.constexpr(HELD_AT)
_DIVISOR = tl.constexpr(DIVISOR)
_MAX, _LAST = tl.constexpr(bits.MAX), tl.constexpr(bits.LAST)


@triton.jit
def _accumulate_kernel(  # noqa: PLR0915 -- one pass over one request
    updates, points, layouts, sums, held, arena, num_points, sum_stride, held_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, ARENA_LINE: tl.constexpr,
):  # fmt: skip
    update = updates + tl.program_id(0) * (_UPDATE_COLUMNS + 2 * SLOTS)
    own = points + tl.program_id(1) * _POINT_COLUMNS
    layout = tl.load(update + _LAYOUT)
    offset = tl.load(layouts + layout * num_points + tl.load(own + _NUMBER), mask=layout >= 0, other=0)
    if offset >= 0:
        accumulator = tl.load(update + _ACCUMULATOR).to(tl.int64)
        kind = tl.load(update + _KIND)
        record = tl.load(update + _RECORD)
        line = tl.load(update + _LINE).to(tl.int64) + offset
        count = tl.load(update + _COUNT)
        columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        # Rows begin at lines, of 16 elements at least: with this hint, they are read and written 16 bytes at a time.
        target = sums + accumulator * sum_stride + tl.multiple_of(tl.load(own + _SUM_AT), 16) + columns
        kept = held + accumulator * SLOTS * held_stride + tl.multiple_of(tl.load(own + _HELD_AT), 16) + columns
        value = tl.load(target, mask=inside, other=0.0)
        if tl.load(update + _FRESH) != 0:
            value = tl.zeros_like(value)
            if kind == _MAX:
                value = value - float("inf")
        for turn in tl.static_range(SLOTS):
            slot = tl.load(update + _UPDATE_COLUMNS + turn)
            if slot >= 0:
                row = tl.load(kept + slot.to(tl.int64) * held_stride, mask=inside, other=0.0).to(tl.float32)
                value = _joined(value, row, kind)
        if kind == _LAST:
            if count > 0:
                newest = arena + (line + (count - 1).to(tl.int64) * record) * ARENA_LINE + columns
                value = tl.load(newest, mask=inside, other=0.0).to(tl.float32)
        else:
            # A sum over thousands of rows, compensated: the rounding error of each addition is added at the next one.
            part = tl.zeros_like(value)
            lost = tl.zeros_like(value)
            for start in range(0, count, TILE):
                number = start + tl.arange(0, TILE)
                rows = arena + (line + number.to(tl.int64) * record)[:, None] * ARENA_LINE + columns[None, :]
                here = (number < count)[:, None] & inside[None, :]
                if kind == _MAX:
                    tile = tl.load(rows, mask=here, other=float("-inf")).to(tl.float32)
                    value = _joined(value, tl.max(tile, 0), kind)
                    value = tl.where(tl.sum((tile != tile).to(tl.int32), 0) > 0, float("nan"), value)
                else:
                    more = tl.sum(tl.load(rows, mask=here, other=0.0).to(tl.float32), 0) - lost
                    total = part + more
                    lost = (total - part) - more
                    lost = tl.where(tl.abs(lost) < float("inf"), lost, 0.0)  # infinity loses nothing
                    part = total
            if kind != _MAX:
                value += part
        divisor = tl.load(update + _DIVISOR)
        if divisor > 1:
            value = value / divisor
        tl.store(target, value, mask=inside)
        for at in tl.static_range(SLOTS):
            source = tl.load(update + _UPDATE_COLUMNS + SLOTS + at)
            if source >= 0:
                late = tl.load(arena + (source.to(tl.int64) + offset) * ARENA_LINE + columns, mask=inside, other=0.0)
                tl.store(kept + at * held_stride, late, mask=inside)


@triton.jit
def _joined(value, row, kind):
    """Combine an accumulator with one further row by the reduction `kind`."""
    if kind == _MAX:
        joined = tl.maximum(value, row, propagate_nan=tl.PropagateNan.ALL)
    elif kind == _LAST:
        joined = row
    else:
        joined = value + row
    return joined


def launch_accumulate(
    updates: Int[torch.Tensor, "requests columns"],
    points: Int[torch.Tensor, "points 3"],
    width: int,
    layouts: Int[torch.Tensor, "layouts all_points"],
    sums: Float[torch.Tensor, "accumulators sum_elements"],
    held: Float[torch.Tensor, "accumulators slots held_elements"],
    arena: Float[torch.Tensor, "lines line"],
) -> None:
    """Update the running reductions at points with equal schemas with the rows of a pass.

    Args:
        updates: one row per request, int32; columns from `ACCUMULATOR` on.
        points: one row per point, int32; columns from `NUMBER` on.
        width: number of elements of a row.
        layouts: line offset of each point in a record, -1 if it is not captured, int32.
        sums: the accumulators, float32, updated in place.
        held: the rows kept apart, in the points' dtype, updated in place.
        arena: the ring buffer with the rows of the pass, in the points' dtype.
    """
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = (len(updates), len(points), triton.cdiv(width, block))
    _accumulate_kernel[grid](
        updates,
        points,
        layouts,
        sums,
        held,
        arena,
        layouts.shape[1],
        sums.stride(0),
        held.stride(1),
        WIDTH=width,
        BLOCK=block,
        TILE=TILE,
        SLOTS=held.shape[1],
        ARENA_LINE=arena.shape[1],
        num_warps=4,
    )
