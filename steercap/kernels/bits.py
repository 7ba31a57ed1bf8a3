"""Constants shared by the PyTorch and Triton implementations: bits of an entry's kind, reductions, codecs, sums."""

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

#: Element of a replacement that keeps the row's own value, so that one head of several can be replaced. It is the
#: greatest number of float32, which no edited row may hold; finite, since kernels multiply vectors by zero.
HOLE: Final = float(np.finfo(np.float32).max)

#: Reductions that run along with a request: the sum of its rows, their maximum, or the newest one.
SUM, MAX, LAST = range(3)

#: Constants of `weight`, chosen among random numbers so that no two sums of two weights are equal among 512 points,
#: and none of three among 64.
SPREAD, MIX, PRIME, FOLD, ROUNDS = 756_402_063, 1_218_545_865, (1 << 31) - 1, 15, 3
#: Upper bound of a token's sum of weights, of 31 bits each. For a row that is not finite, `NOT_FINITE * (p + 1)` is
#: added once, for the first such point `p`: either an edit left the row too large there, or the row was copied.
NOT_FINITE: Final = 1 << 48


#: Columns of the device's table of a step's tokens, int32; -1 where a token has no such thing.
TOKEN_COLUMNS: Final = 8
LAYOUT, SLOT, MASK, LINE, BEFORE, REPLACED, REPORT = range(7)
#: Steps between the least and the greatest code of `kernels.codecs.full8`, and bytes before the codes: scale and zero.
FULL8_STEPS: Final = 255
FULL8_HEAD: Final = 8
#: The greatest number of e4m3, and bytes before the codes of `kernels.codecs.fp8`: the scale.
FP8_MOST: Final = 448
FP8_HEAD: Final = 4
#: Bytes before the indices of `kernels.codecs.topk8`: scale, zero point, the least magnitude kept.
TOPK8_HEAD: Final = 12
#: Steps of a code of `kernels.codecs.int4`.
INT4_STEPS: Final = 15
#: Elements that share a scale in the codecs `int4`, `rp8` and `rp16`.
GROUP: Final = 128


def weight(point: int) -> int:
    """Return the weight of one edit or copy at a point in a token's checksum: pseudorandom, 1 to 2^31.

    One edit too few here and one too many there do not cancel; nor do two too few at points 1 and 3 and two too many
    at 2, as they would in a sum of the points' numbers. No intermediate product has more than 62 bits.
    """
    mixed = (point + 1) * SPREAD % PRIME
    for _ in range(ROUNDS):
        mixed = (mixed ^ (mixed >> FOLD)) * MIX % PRIME
    return mixed + 1


def split_checksum(checksums: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split checksums into their two parts.

    Returns:
        Sum of weights, and index of the first point whose row was not finite, -1 for none: int64, of the same shape.
    """
    return checksums & (NOT_FINITE - 1), (checksums >> NOT_FINITE.bit_length() - 1) - 1
