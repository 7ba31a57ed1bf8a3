"""What an entry of a program is, as bits of its kind, and how rows are added up: what PyTorch and Triton agree on."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

USED: Final = 1
READS: Final = 2
RELATIVE: Final = 4
REPLACES: Final = 8
JOINED: Final = 16
LEADS: Final = 32  # the entry after it reads the same row
MEASURES: Final = 64  # the norm of the row is measured before it
RESTORES: Final = 128  # ... and restored after it

#: An element of a replacement that leaves the row's own as it is: so one head of several is replaced. The greatest
#: number of float32, which no edited row may hold; finite, since kernels multiply vectors by zero.
HOLE: Final = float(np.finfo(np.float32).max)

#: How rows are added to a reduction that runs along: their sum, their greatest, or the newest alone.
SUM, MAX, LAST = range(3)

#: What the weights of points are made of: chosen among numbers drawn at random so that no two sums of two weights are
#: alike among 512 points, and none of three among 64. See `weight`.
SPREAD, MIX, PRIME, FOLD, ROUNDS = 756_402_063, 1_218_545_865, (1 << 31) - 1, 15, 3
#: Evidence is below this: a weight has 31 bits. A token with a row that is not finite counts `STRAY * (p + 1)` once
#: more, for the first such point `p`: there it was edited to more than a row may hold, or copied.
STRAY: Final = 1 << 48


#: Steps between the least and the greatest code of `encodings.full8`, and bytes before the codes: scale and zero point.
FULL8_STEPS: Final = 255
FULL8_HEAD: Final = 8
#: The greatest number of e4m3, and bytes before the codes of `encodings.fp8`: the scale.
FP8_MOST: Final = 448
FP8_HEAD: Final = 4
#: Bytes before the indices of `encodings.topk8`: scale, zero point, the least magnitude kept.
TOPK8_HEAD: Final = 12
#: Steps of a code of `encodings.int4`.
INT4_STEPS: Final = 15
#: Elements that have a scale in common in `encodings.int4`, `rp8` and `rp16`.
GROUP: Final = 128


def weight(point: int) -> int:
    """What an application or a copy at a point counts in a token's evidence: as if drawn at random, 1 to 2^31.

    One too few here and one too many there do not cancel; nor do two too few at points 1 and 3 and two too many at 2,
    as they would in a sum of the points' numbers. No product on the way has more than 62 bits.
    """
    mixed = (point + 1) * SPREAD % PRIME
    for _ in range(ROUNDS):
        mixed = (mixed ^ (mixed >> FOLD)) * MIX % PRIME
    return mixed + 1


def told_apart(evidence: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What applications or copies add up to, and the first point whose row was not finite, -1 for none."""
    return evidence % STRAY, evidence // STRAY - 1
