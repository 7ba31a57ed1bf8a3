"""Uniform quantisation on CUDA: the arithmetic that the kernels of codecs have in common, that of `encodings.uniform`.

Scales and values are tensors of any shape; `axis` is what a scale covers.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

#: Elements of a row that one warp has in registers.
WARP_ELEMENTS: Final = 1024

#: Numbers below it are computed as so many times themselves.
_SMALL, _LIFT = tl.constexpr(2.0**-90), tl.constexpr(2.0**100)


@triton.jit  # type: ignore[untyped-decorator]
def step_of(least, most, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 step of which STEPS cover what lies between two float32 numbers."""
    spread = most.to(tl.float64) - least.to(tl.float64)
    step = (spread / STEPS).to(tl.float32)
    larger = (step.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(step.to(tl.float64) * STEPS < spread, larger, step)  # so that no code is beyond the last


@triton.jit
def lift_of(magnitude):  # type: ignore[no-untyped-def]
    """A power of two by which numbers up to a magnitude are multiplied before they are subtracted and divided: no
    difference overflows then, and none of denormal numbers is lost.
    """
    return tl.where(magnitude < _SMALL, _LIFT, 0.5)


@triton.jit
def steps_from(values, zero, scale, lift):  # type: ignore[no-untyped-def]
    """How many steps numbers are from zero points; 0 where there is no step."""
    return tl.where(scale > 0, (values * lift - zero * lift) / tl.where(scale > 0, scale * lift, 1.0), 0.0)


@triton.jit
def nearest(steps):  # type: ignore[no-untyped-def]
    """The nearest whole number; of two the even one. Of numbers below 2^22."""
    return (steps + 12582912.0) - 12582912.0


@triton.jit  # type: ignore[untyped-decorator]
def all_finite(values, inside, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether all numbers along an axis are."""
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
    """Run the kernel of a codec with a program for each row.

    Args:
        kernel: what takes `rows, codes, heads, records, points` and the constants of their layout.
        rows, ring, records, points, width: as for `launch_full8`.
        block: elements that a program has.
        **more: what else the kernel takes.
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
