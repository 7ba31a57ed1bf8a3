"""Schema of a point's tensor: read where its tap is installed, and sent to the client."""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from steercap.core.framing import Label, Step, Whole


class PointSchema(msgspec.Struct, frozen=True, array_like=True):
    """Shape, dtype and properties of the tensor at one point.

    Args:
        shape: shape of one token's row, of all tensor-parallel ranks together: `(4096,)`, heads `(32, 128)`.
        dtype: torch name of the rows' dtype: the model's, or "float32" for routers.
        shards: number of tensor-parallel ranks that the first axis is split over, in equal parts; 1 where each has all.
        writable: True if rows can be edited.
        changes_kv: True if a cached key or value depends on the row.
        tokens: computed tokens that have a row: "all", or those "sampled" from.
    """

    shape: tuple[Whole, ...]
    dtype: Label
    shards: Step = 1
    writable: bool = True
    changes_kv: bool = True
    tokens: Literal["all", "sampled"] = "all"

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        return prod(self.shape)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the part of a row that one rank has."""
        return (self.shape[0] // self.shards, *self.shape[1:])

    @property
    def shard_width(self) -> int:
        """Number of elements of the part of a row that one rank has."""
        return self.width // self.shards

    def __str__(self) -> str:
        split = f", split over {self.shards} ranks" if self.shards > 1 else ""
        return f"{'×'.join(map(str, self.shape))} of {self.dtype}{split}"
