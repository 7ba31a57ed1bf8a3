"""Constants shared by the PyTorch and Triton implementations, bounds of edited rows, and full matmul precision.

A row that overflows becomes NaN in the next norm, NaN in keys and values, and stays in their blocks when another
request gets them: attention multiplies masked values by zero, and zero times NaN is NaN. So an edited row that is too
large is set to zero where it was edited, and its request fails.

The bound depends on the dtype. Since each block norms its input, a layer's output is bounded by its weights, whatever
the stream's values. In bfloat16 and float32 a bound far below the dtype's maximum is therefore enough: edits at every
point of the deepest model add up to less than `EDITED_MOST * 2**12`, whose squares a norm over 2**16 elements can still
sum in float32. In float16 there is no such room, so there the rows of edited tokens are checked again at every point
that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float

USED: Final = 1
READS: Final = 2
RELATIVE: Final = 4
REPLACES: Final = 8
JOINED: Final = 16
LEADS: Final = 32  # the entry after it reads the same row
MEASURES: Final = 64  # the norm of the row is measured before it
RESTORES: Final = 128  # ... and restored after it

#: Kinds of reductions that are updated in each pass: sum of the rows, their maximum, or the last row.
SUM, MAX, LAST = range(3)

#: Constants of `weight`, chosen so that no two sums of two weights are equal among 512 points,
#: and none of three among 64.
SPREAD, MIX, PRIME, FOLD, ROUNDS = 756_402_063, 1_218_545_865, (1 << 31) - 1, 15, 3
#: Upper bound of a token's sum of weights of 31 bits each. For the first point `p` with a row that is not finite,
#: `NOT_FINITE * (p + 1)` is added: either an edit made the row too large there, or the row was copied.
NOT_FINITE: Final = 1 << 48


#: Columns of the device's table of a step's tokens, int32; -1 for none.
TOKEN_COLUMNS: Final = 8
LAYOUT, SLOT, MASK, LINE, BEFORE, REPLACED, REPORT = range(7)
#: Maximum code of `full8`, and number of bytes before the codes of a row: scale and zero.
FULL8_STEPS: Final = 255
FULL8_HEAD: Final = 8
#: Maximum number of e4m3, and number of bytes before the codes of `fp8`: the scale.
FP8_MOST: Final = 448
FP8_HEAD: Final = 4
#: Number of bytes before the indices of `topk8`: scale, zero point, smallest stored magnitude.
TOPK8_HEAD: Final = 12
#: Maximum code of `int4`.
INT4_STEPS: Final = 15
#: Number of elements that share a scale in the codecs `int4`, `rp8` and `rp16`.
GROUP: Final = 128


def weight(point: int) -> int:
    """Return the weight of an edit or copy at a point in a token's checksum: pseudorandom, 1 to 2^31.

    So a missing edit at one point and a surplus edit at another do not cancel, as they could in a sum of point numbers.
    No intermediate product has more than 62 bits.
    """
    mixed = (point + 1) * SPREAD % PRIME
    for _ in range(ROUNDS):
        mixed = (mixed ^ (mixed >> FOLD)) * MIX % PRIME
    return mixed + 1


def split_checksum(checksums: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split checksums of tokens, int64, into their two parts.

    Returns:
        Sums of weights; and index of the first point whose row is not finite, -1 for none: int64, same shape.
    """
    return checksums & (NOT_FINITE - 1), (checksums >> NOT_FINITE.bit_length() - 1) - 1


#: Maximum magnitude of an edited row's elements in bfloat16 and float32; elements of real models stay below 1e6.
EDITED_MOST: Final = 2.0**40


def edited_most(dtype: torch.dtype) -> float:
    """Return the maximum magnitude that an element of an edited row may have in a model of this dtype."""
    return torch.finfo(dtype).max if dtype == torch.float16 else EDITED_MOST


def overflows_later(dtype: torch.dtype) -> bool:
    """Check if an edited row within `edited_most` can still overflow in later layers, as in float16."""
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


class _ExactProducts:
    """Counter of running `exact_products` blocks, which sets float32 matmul precision while it is above 0."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._restore: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Enter a block; the first one sets full precision."""
        with self._lock:
            if not self._inside:
                self._restore = self._set()
            self._inside += 1

    def end(self) -> None:
        """Leave a block; the last one restores the process's precision."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore()

    @staticmethod
    def _set() -> Callable[[], None]:
        kinds: list[Any] = [kind.matmul for kind in (torch.backends.cuda, torch.backends.mkldnn)]
        precisions = [kind.fp32_precision for kind in kinds]
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # the process has set it by kind of product, which this function refuses to read
            _set_precisions(kinds, ["ieee"] * len(kinds))
            return partial(_set_precisions, kinds, precisions)
        torch.set_float32_matmul_precision("highest")
        return partial(_set_precisions, kinds, precisions, before)


def _set_precisions(kinds: Sequence[Any], precisions: Sequence[str], overall: str | None = None) -> None:
    """Set the process's precision of products, unless None, and then that of each kind, which the former overwrites."""
    if overall is not None:
        torch.set_float32_matmul_precision(overall)
    for kind, precision in zip(kinds, precisions, strict=True):
        kind.fp32_precision = precision


_EXACT: Final = _ExactProducts()


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 matrix products in the block at full precision, not in TF32 or bfloat16.

    Autocast is off inside. Also a decorator. It is set for the whole process; several threads may use it at once.
    """
    _EXACT.begin()
    try:
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        _EXACT.end()
