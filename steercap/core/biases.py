"""Compiled logit biases: token ids, values to add, and positions.

The logits of position `p` say which token comes at `p + 1`. vLLM makes them at the last token of a prompt and at each
generated one, and nowhere else, whatever a scope says.
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

#: Maximum number of entries of all biases of a configuration together: 8 MiB of a frame.
MAX_ENTRIES: Final = 1 << 20
_IDS: Final = np.dtype("<i4")
_VALUES: Final = np.dtype("<f4")


class Bias(msgspec.Struct, frozen=True, array_like=True):
    """Values added to the logits of some tokens, at the positions of a scope.

    Args:
        edit: index of the user's edit that it comes from.
        scope: index of its token selection among those of the biases of the configuration.
        ids: distinct token ids, ascending: int32, little-endian.
        values: value added to the logit of each: float32, little-endian.
    """

    edit: Whole
    scope: Whole
    ids: Data
    values: Data

    @staticmethod
    def of(edit: int, scope: int, ids: Sequence[int], values: Sequence[float]) -> Bias:
        """Make a bias from token ids and values."""
        return Bias(edit, scope, np.array(ids, _IDS).tobytes(), np.array(values, _VALUES).tobytes())

    def __len__(self) -> int:
        return len(self.ids) // _IDS.itemsize

    @property
    def entries(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Token ids, int64, and values, float32."""
        return np.frombuffer(self.ids, _IDS).astype(np.int64), np.frombuffer(self.values, _VALUES).astype(np.float32)


@lru_cache(maxsize=64)
def combined(biases: tuple[Bias, ...], mask: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Add up the biases that apply at a position.

    Returns:
        Distinct token ids, ascending, int64; and the sum for each, float32.
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
    """Return the scopes that hold each position as bit masks: bit `i` of entry `p` for scope `i`, int32 [limit].

    Positions whose logits are not made have 0.

    Args:
        scopes: positions of each scope.
        prompt_len: number of prompt tokens; no logits are made before the last.
        limit: number of positions that can be inputs of the model.
    """
    masks = np.zeros(limit, dtype=np.int32)
    for bit, ranges in enumerate(scopes):
        masks |= selected(ranges, limit).astype(np.int32) << bit
    masks[: prompt_len - 1] = 0
    masks.flags.writeable = False
    return masks


def entries_put(biases: tuple[Bias, ...], masks: Iterable[int]) -> int:
    """Count the logits changed at positions with these scope masks, all together."""
    counts = np.unique(np.fromiter(masks, dtype=np.int64), return_counts=True)
    return sum(len(combined(biases, int(mask))[0]) * int(count) for mask, count in zip(*counts, strict=True))
