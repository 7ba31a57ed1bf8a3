"""Byte layout of a token's record: the encoded rows of its points, one after another.

Arenas are counted in lines of `LINE_BYTES`, so rows of any width and dtype share one. Pure arithmetic: workers write
records by it, and clients read them by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

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
