"""Float32 in the kernels: bounds of the elements that a row may hold, and matrix products at full precision.

A row that overflows becomes NaN in the next norm, NaN in keys and values, and stays in their blocks when another
request gets them: attention multiplies masked values by zero, and zero times NaN is NaN. So an edited row that is too
large is set to zero where it was edited, and its request fails.

The bound depends on the dtype. A layer adds to the stream what its weights allow, whatever the stream
holds, since its norms come first. In bfloat16 and float32 a bound far below the greatest number is therefore enough:
edits at every point of the deepest model, on top of each other, stay below `EDITED_MOST * 2**12`, whose squares a
norm over 2**16 elements can still sum in float32. In float16 there is no such room, so there the rows of edited tokens
are checked again at every point that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Final

import torch
from jaxtyping import Bool, Float

#: The greatest element that an edited row may have in bfloat16 and float32; elements of real models stay below 1e6.
EDITED_MOST: Final = 2.0**40


def edited_most(dtype: torch.dtype) -> float:
    """Return the greatest magnitude that an element of an edited row may have."""
    return torch.finfo(dtype).max if dtype == torch.float16 else EDITED_MOST


def overflows_later(dtype: torch.dtype) -> bool:
    """Return whether a row within `edited_most` can still overflow in later layers."""
    return dtype == torch.float16


def stray_rows(rows: Float[torch.Tensor, "rows width"], most: float = inf) -> Bool[torch.Tensor, " rows"] | None:
    """Return a mask of the rows with an element that is NaN, infinite or beyond ±`most`; None if there are none."""
    if not rows.numel():
        return None
    least, greatest = torch.aminmax(rows)  # NaN if any is; several times faster than looking at each row
    if -most <= least and greatest <= most and (greatest - least).isfinite():
        return None
    stray = ~((rows.abs() <= most) & rows.isfinite()).all(-1)
    return stray if stray.any() else None


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 matrix products at full precision, not in TF32 or bfloat16, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
