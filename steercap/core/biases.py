"""Compiled logit biases: token ids, values to add, and positions.

The logits of position `p` predict the token at `p + 1`. vLLM computes logits only at the last prompt token and at each
generated token, whatever a scope selects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from steercap.core.framing import Data, Whole
from steercap.core.tokens import Range, selected

#: Maximum number of biased token ids of all biases of a configuration together: 8 MiB of a frame.
MAX_ENTRIES: Final = 1 << 20
_IDS: Final = np.dtype("<i4")
_VALUES: Final = np.dtype("<f4")


class Bias(msgspec.Struct, frozen=True, array_like=True):
    """Values to add to the logits of some tokens, at the positions of a scope.

    Args:
        edit: index of the user's edit from which it was compiled.
        scope: index of its token selection among the scopes of the configuration's biases.
        ids: distinct token ids, ascending: bytes of little-endian int32.
        values: value added to the logit of each token: bytes of little-endian float32.
    """

    edit: Whole
    scope: Whole
    ids: Data
    values: Data

    @staticmethod
    def of(edit: int, scope: int, ids: Sequence[int], values: Sequence[float]) -> Bias:
        """Make a bias from token ids, which must be distinct and ascending, and their values."""
        return Bias(edit, scope, np.array(ids, _IDS).tobytes(), np.array(values, _VALUES).tobytes())

    def __len__(self) -> int:
        return len(self.ids) // _IDS.itemsize

    @property
    def entries(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Token ids, int64 [n], and the values added to their logits, float32 [n]."""
        return np.frombuffer(self.ids, _IDS).astype(np.int64), np.frombuffer(self.values, _VALUES).astype(np.float32)


@lru_cache(maxsize=64)
def combined(biases: tuple[Bias, ...], mask: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Add up the biases whose scope's bit is set in `mask`, the scope mask of a position; see `bias_masks`.

    Returns:
        Distinct token ids, ascending, int64 [n]; and the sum of values for each, float32 [n]. Both read-only.
    """
    found = [bias.entries for bias in biases if mask >> bias.scope & 1]
    ids = np.concatenate([np.zeros(0, dtype=np.int64), *(one for one, _ in found)])
    values = np.concatenate([np.zeros(0), *(one for _, one in found)])
    unique, places = np.unique(ids, return_inverse=True)
    sums = np.bincount(places, weights=values, minlength=len(unique)).astype(np.float32)
    unique.flags.writeable = sums.flags.writeable = False
    return unique, sums


@lru_cache(maxsize=256)
def bias_masks(scopes: tuple[tuple[Range, ...], ...], prompt_len: int, limit: int) -> npt.NDArray[np.int32]:
    """Return bit masks of the scopes that select each position: bit `i` of entry `p` for scope `i`, int32 [limit].

    Entries are 0 at positions without logits. The array is read-only.

    Args:
        scopes: selected position ranges of each scope.
        prompt_len: number of prompt tokens; there are no logits before the last.
        limit: number of positions that can be model inputs.
    """
    masks = np.zeros(limit, dtype=np.int32)
    for bit, ranges in enumerate(scopes):
        masks |= selected(ranges, limit).astype(np.int32) << bit
    masks[: prompt_len - 1] = 0
    masks.flags.writeable = False
    return masks


def entries_put(biases: tuple[Bias, ...], masks: Iterable[int]) -> int:
    """Count the logits that biases change, over all positions, given each position's scope mask."""
    counts = np.unique(np.fromiter(masks, dtype=np.int64), return_counts=True)
    return sum(len(combined(biases, int(mask))[0]) * int(count) for mask, count in zip(*counts, strict=True))
