"""Rows as they are stored: the schema of a point's tensor, their encoding, and the byte layout of a token's record.

A schema is read where the point's tap is installed, and sent to the client. A record is the encoded rows of a token's
points, one after another. Arenas are counted in lines of `LINE_BYTES`, so rows of any width and dtype share one. Pure
arithmetic: workers write records by it, and clients read them by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Final, Literal, NamedTuple

import msgspec

from steercap.core.framing import Label, Numbers, Seed, Step, Whole


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


class Coding(msgspec.Struct, frozen=True, array_like=True):
    """An encoding with its parameters.

    Args:
        encoding: name in `ENCODINGS`.
        k: number of values stored per row, for encodings with that parameter; 0 for others.
        seed: seed of the projection matrix, for encodings that have one; 0 for others.
    """

    encoding: Label = "raw"
    k: Numbers = 0
    seed: Seed = 0

    def __str__(self) -> str:
        named = [f"{name}={value}" for name, value in (("k", self.k), ("seed", self.seed)) if value]
        return f"{self.encoding}({', '.join(named)})" if named else self.encoding


#: Encodings of rows, bit for bit, and of reductions, in float32.
RAW: Final = Coding()
REDUCED: Final = Coding("reduced")
#: Name of the encoding of what `CaptureSpec(attention=)` keeps of queries and keys.
ATTENTION: Final = "attention"


#: Bytes of a line of an arena: a cache line; no store on a GPU needs an address that is aligned to more.
LINE_BYTES: Final = 64
#: Target size of a page in bytes: small enough that short requests waste little, large enough that a request needs few.
PAGE_BYTES: Final = 256 * 1024


class RecordShape(NamedTuple):
    """Layout of a token's record.

    Args:
        offsets: offset of the row of each point, in bytes.
        sizes: size of each row, in bytes.
        lines: number of arena lines of the record.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    lines: int


def record_shape(sizes: Sequence[int], align: int = LINE_BYTES) -> RecordShape:
    """Lay out rows one after another in a record.

    Args:
        sizes: size of each encoded row, in bytes.
        align: alignment of each row's offset, in bytes.
    """
    ends = tuple(accumulate(-(-size // align) * align for size in sizes))
    return RecordShape((0, *ends[:-1]) if ends else (), tuple(sizes), -(-ends[-1] // LINE_BYTES) if ends else 0)
