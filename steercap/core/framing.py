"""Header of every frame between client and workers, a magic number and a format version; types of bounded fields.

Client and workers may be installed separately, on machines of a cluster. A frame of another version is refused with an
error that has both versions. Increase `VERSION` with any change of the meaning of a frame, plan or configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from steercap.errors import InvalidFrame

Part = TypeVar("Part")

#: Version of the frames, plans and configurations that this steercap writes; it reads no other.
VERSION: Final = 3
_MAGIC: Final = b"sc"
HEADER: Final = _MAGIC + VERSION.to_bytes(2, "little")
#: Maximum length of a frame in bytes: more than any message needs, and too little to exhaust memory.
MOST_BYTES: Final = 1 << 30

#: Count, index, position or arena line: 0 to 2**32 - 1.
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
#: `Whole`, or -1 for none.
WholeOrNone: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)]
#: Distance between consecutive positions of a range, 1 or more.
Step: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
#: Number of bytes, or a counter of a long-running process: 0 to 2**60 - 1.
Large: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
#: Number of values that a codec stores per row, 0 to 2**16, which bounds the codec's matrices.
Numbers: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
#: Seed of a random matrix: a non-negative integer of 64 bits.
Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
#: Short text: a key, or the name of a point, kind or encoding.
Label: TypeAlias = Annotated[str, msgspec.Meta(max_length=1 << 12)]
#: SHA-256 digest; of another length, it matches nothing.
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]
#: Text of a path, a reason or an error, up to 1 Mi characters.
BoundedText: TypeAlias = Annotated[str, msgspec.Meta(max_length=1 << 20)]
#: Bytes of rows, vectors or labels, up to `MOST_BYTES`.
Data: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MOST_BYTES)]


def in_batches(
    parts: Iterable[Part], bytes_of: Callable[[Part], int], most_bytes: int, most: int | None = None
) -> Iterator[tuple[Part, ...]]:
    """Yield consecutive batches of at most `most_bytes` bytes and `most` parts; a larger part is a batch by itself."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        if batch and (size + bytes_of(part) > most_bytes or len(batch) == most):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(part)
        size += bytes_of(part)
    if batch:
        yield tuple(batch)


def framed(body: bytes) -> bytes:
    """Return a frame: the header followed by the encoded body."""
    return HEADER + body


def read(decoder: msgspec.msgpack.Decoder[Any], frame: object, what: str) -> Any:
    """Check a frame's header and decode its body.

    Args:
        decoder: decoder of the body's type.
        frame: bytes received.
        what: name of the frame, for error messages.

    Raises:
        InvalidFrame: the frame is not bytes, longer than `MOST_BYTES`, of another version, damaged, or has a value out
            of bounds.
    """
    if not isinstance(frame, (bytes, bytearray)):
        raise InvalidFrame(f"{what}: expected bytes, got {type(frame).__name__}")
    if len(frame) > MOST_BYTES:
        raise InvalidFrame(f"{what}: {len(frame):,} bytes came; at most {MOST_BYTES:,} are read")
    if frame[: len(HEADER)] != HEADER:
        raise InvalidFrame(f"{what}: {_difference(bytes(frame[: len(HEADER)]))}")
    try:
        return decoder.decode(memoryview(frame)[len(HEADER) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise InvalidFrame(f"{what} is damaged: {error}") from error


def _difference(header: bytes) -> str:
    if header[: len(_MAGIC)] != _MAGIC or len(header) < len(HEADER):
        return f"it begins with {header!r}, which is not a frame of steercap"
    version = int.from_bytes(header[len(_MAGIC) :], "little")
    return f"it is of version {version} of steercap's frames, this process reads {VERSION}; install one steercap on all"
