"""Random frames: every message with every field at random within its bounds, and what is no frame at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from msgspec import inspect

from steercap.core.framing import HEADER

#: Words that mean something in some field, so that what is random gets beyond the first look at it.
WORDS: Final = (
    "", "raw", "reduced", "projected", "full8", "topk8", "rp8", "features", "float32", "bfloat16", "int64", "moments",
    "variances", "frequent_directions", "r1", "r2", "s", "z", "neurons", "mean", "é", "/proc/self/fd/0",
)  # fmt: skip
#: Elements of a random sequence, at most.
MOST: Final = 5
_EDGES: Final = 8


def random_of(kind: Any, rng: random.Random) -> Any:
    """A value of a type that msgspec knows.

    Args:
        kind: the type.
        rng: where it comes from.
    """
    return _value(_known(kind), rng)


def mangled(frame: bytes, rng: random.Random) -> bytes:
    """A frame with some of its bytes changed, left out, doubled or put elsewhere; the header mostly stays."""
    found = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        first = 0 if rng.random() < 1 / 16 else len(HEADER)
        at = rng.randint(min(first, len(found)), len(found))
        rng.choice(_CHANGES)(found, at, rng)
    return bytes(found)


def _flip(found: bytearray, at: int, rng: random.Random) -> None:
    if at < len(found):
        found[at] ^= 1 << rng.randrange(8)


def _length(found: bytearray, at: int, rng: random.Random) -> None:
    """Put the beginning of something long there, of which nothing comes."""
    marks = (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")  # array, map, bin, str, ext, each with four bytes of length
    found[at : at + rng.randint(0, 5)] = rng.choice(marks) + rng.randbytes(4)


def _cut(found: bytearray, at: int, rng: random.Random) -> None:
    del found[at : at + rng.choice((1, 4, len(found)))]


def _double(found: bytearray, at: int, rng: random.Random) -> None:
    found[at:at] = found[at : at + rng.randint(1, 64)]


def _noise(found: bytearray, at: int, rng: random.Random) -> None:
    found[at : at + rng.randint(0, 8)] = rng.randbytes(rng.randint(1, 8))


_CHANGES: Final[tuple[Callable[[bytearray, int, random.Random], None], ...]] = (_flip, _length, _cut, _double, _noise)


_known: Final = cache(inspect.type_info)


def _value(kind: inspect.Type, rng: random.Random) -> Any:  # noqa: PLR0912 -- one line per kind of type
    match kind:
        case inspect.Metadata():
            return _value(kind.type, rng)
        case inspect.UnionType():
            return _value(rng.choice(kind.types), rng)
        case inspect.StructType():
            return kind.cls(**{field.name: _value(field.type, rng) for field in kind.fields})
        case inspect.VarTupleType():
            return tuple(_value(kind.item_type, rng) for _ in range(rng.randint(0, MOST)))
        case inspect.TupleType():
            return tuple(_value(item, rng) for item in kind.item_types)
        case inspect.DictType():
            count = rng.randint(0, MOST)
            return {_value(kind.key_type, rng): _value(kind.value_type, rng) for _ in range(count)}
        case inspect.LiteralType():
            return rng.choice(kind.values)
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return rng.random() < 1 / 2
        case inspect.IntType():
            return _int(kind, rng)
        case inspect.FloatType():
            return rng.choice((0.0, -1.0, 1e-30, 1e300, float("inf"), float("-inf"), rng.gauss(0, 1)))
        case inspect.StrType():
            return rng.choice(WORDS)
        case inspect.BytesType():
            least = kind.min_length or 0
            return rng.randbytes(
                rng.choice([size for size in (least, 4, 32, 128) if size <= (kind.max_length or size)])
            )
    raise TypeError(f"no random value of {kind!r}")


def _int(kind: inspect.IntType, rng: random.Random) -> int:
    least = -_EDGES if kind.ge is None else kind.ge
    most = next((one for one in (kind.le, None if kind.lt is None else kind.lt - 1) if one is not None), 1 << 62)
    edges = (least, least + 1, most, most // 2, rng.randint(least, most))
    return rng.choice(edges) if rng.random() < 1 / 4 else rng.randint(least, least + _EDGES)
