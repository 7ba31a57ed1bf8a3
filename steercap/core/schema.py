"""Storage of rows: a point's row shape and dtype, the encoding, and the byte layout of a token's record.

A worker makes a point's schema when it installs the tap, and sends it to the client. A record is the concatenated
encoded rows of one token at all captured points. Arenas are divided into lines of `LINE_BYTES`, so rows of any width
and dtype can share one. Pure arithmetic, used by workers to write records and by the client to read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Final, Literal, NamedTuple

import msgspec

from steercap.core.framing import Label, Numbers, Seed, Step, Whole


class PointSchema(msgspec.Struct, frozen=True, array_like=True):
    """Shape, dtype and properties of the rows at one point.

    Args:
        shape: shape of one token's row, over all tensor-parallel ranks: `(4096,)`, or `(32, 128)` for heads.
        dtype: torch name of the rows' dtype: the model's, or "float32" for routers.
        shards: number of tensor-parallel ranks that split the first axis equally; 1 if each rank has all of it.
        writable: True if rows can be edited.
        changes_kv: True if a cached key or value depends on the row.
        tokens: tokens that have a row: "all" computed ones, or those "sampled" from.
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
        """Shape of one rank's part of a row."""
        return (self.shape[0] // self.shards, *self.shape[1:])

    @property
    def shard_width(self) -> int:
        """Number of elements of one rank's part of a row."""
        return self.width // self.shards

    def __str__(self) -> str:
        split = f", split over {self.shards} ranks" if self.shards > 1 else ""
        return f"{'×'.join(map(str, self.shape))} of {self.dtype}{split}"


class Coding(msgspec.Struct, frozen=True, array_like=True):
    """Encoding of stored rows, with its parameters.

    Args:
        encoding: name of the encoding, a key of `kernels.codecs.ENCODINGS`.
        k: number of values stored per row, for encodings with that parameter; 0 for others.
        seed: seed of the projection matrix, for encodings that have one; 0 for others.
    """

    encoding: Label = "raw"
    k: Numbers = 0
    seed: Seed = 0

    def __str__(self) -> str:
        named = [f"{name}={value}" for name, value in (("k", self.k), ("seed", self.seed)) if value]
        return f"{self.encoding}({', '.join(named)})" if named else self.encoding


#: Encodings that store rows unchanged, and reductions in float32.
RAW: Final = Coding()
REDUCED: Final = Coding("reduced")
#: Name of the encoding of attention summaries, `CaptureSpec(attention=)`.
ATTENTION: Final = "attention"


#: Number of bytes of an arena line: a cache line of a CPU. No store on a GPU needs a larger alignment.
LINE_BYTES: Final = 64
#: Target size of a page in bytes: small enough that short requests waste little, large enough that a request needs few.
PAGE_BYTES: Final = 256 * 1024


class RecordShape(NamedTuple):
    """Byte layout of one token's record.

    Args:
        offsets: offset of each point's row in the record, in bytes.
        sizes: size of each point's encoded row, in bytes.
        lines: number of arena lines of the record.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    lines: int


def record_shape(sizes: Sequence[int], align: int = LINE_BYTES) -> RecordShape:
    """Lay out encoded rows one after another in a record.

    Args:
        sizes: size of each encoded row, in bytes.
        align: alignment of each row's offset, in bytes.
    """
    ends = tuple(accumulate(-(-size // align) * align for size in sizes))
    return RecordShape((0, *ends[:-1]) if ends else (), tuple(sizes), -(-ends[-1] // LINE_BYTES) if ends else 0)
