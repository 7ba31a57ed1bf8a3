"""Uniform quantisation on CUDA: the arithmetic that the codecs' kernels share, that of `kernels.codecs.uniform`.

Scales and values are tensors of any shape; `axis` is the one that a scale covers.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

#: Elements of a row that one warp holds in registers.
WARP_ELEMENTS: Final = 1024

#: Numbers below the first are multiplied by the second before they are computed with.
_SMALL, _LIFT = tl.constexpr(2.0**-90), tl.constexpr(2.0**100)


@triton.jit
def step_of(least, most, STEPS: tl.constexpr):
    """Return `(most - least) / STEPS` as float32, rounded up if needed so that STEPS steps reach `most`."""
    spread = most.to(tl.float64) - least.to(tl.float64)
    step = (spread / STEPS).to(tl.float32)
    larger = (step.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(step.to(tl.float64) * STEPS < spread, larger, step)  # so that no code is beyond the last


@triton.jit
def lift_of(magnitude):
    """Return a power of two by which to multiply numbers of at most `magnitude` before subtracting and dividing them.

    So no difference overflows, and no denormal number is lost.
    """
    return tl.where(magnitude < _SMALL, _LIFT, 0.5)


@triton.jit
def steps_from(values, zero, scale, lift):
    """Return `(values - zero) / scale`, computed on numbers times `lift`; 0 where the scale is 0."""
    return tl.where(scale > 0, (values * lift - zero * lift) / tl.where(scale > 0, scale * lift, 1.0), 0.0)


@triton.jit
def nearest(steps):
    """Round to the nearest whole number, ties to even; for numbers below 2^22."""
    return (steps + 12582912.0) - 12582912.0


@triton.jit
def all_finite(values, inside, axis: tl.constexpr):
    """Return whether all numbers along an axis are finite."""
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
    """Launch the kernel of a codec with one program per row.

    Args:
        kernel: kernel that takes `rows, codes, heads, records, points` and the constants of their layout.
        rows, ring, records, points, width: as for `launch_full8`.
        block: elements of a program.
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
