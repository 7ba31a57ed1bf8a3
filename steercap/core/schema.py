"""What the tensor at a point is: determined where the taps are put in, sent to the client, and never guessed."""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from steercap.core.framing import Label, Step, Whole


class PointSchema(msgspec.Struct, frozen=True, array_like=True):
    """One point's tensor.

    Args:
        shape: of one token's row, on all tensor-parallel ranks together: `(4096,)`, heads `(32, 128)`.
        dtype: of the rows, by its torch name: the model's, or "float32" for routers.
        shards: tensor-parallel ranks that the first axis is split over, in equal parts; 1 where each has all of it.
        writable: whether rows can be edited.
        changes_kv: whether a key or value that is cached depends on the row.
        tokens: which computed tokens have a row: "all", or those "sampled" from.
    """

    shape: tuple[Whole, ...]
    dtype: Label
    shards: Step = 1
    writable: bool = True
    changes_kv: bool = True
    tokens: Literal["all", "sampled"] = "all"

    @property
    def width(self) -> int:
        """Elements of a row."""
        return prod(self.shape)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Of the part of a row that one rank has."""
        return (self.shape[0] // self.shards, *self.shape[1:])

    @property
    def shard_width(self) -> int:
        """Elements of that part."""
        return self.width // self.shards

    def __str__(self) -> str:
        split = f", split over {self.shards} ranks" if self.shards > 1 else ""
        return f"{'×'.join(map(str, self.shape))} of {self.dtype}{split}"
