"""Header of every frame between client and workers: a magic number and the format version.

Client and workers may be installed apart, on machines of a cluster. A frame of another version is refused with both
versions in the message, and never read as if it were of this one. Raise `VERSION` with any change of the meaning of a
frame, a plan or a configuration.
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
#: Maximum length of a frame in bytes: more than any question or answer needs, and less than would exhaust memory.
MOST_BYTES: Final = 1 << 30

#: A count, an index, a position or an arena line: non-negative, of 32 bits.
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
#: The same, or -1 for none.
WholeOrNone: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)]
#: Distance between consecutive positions.
Step: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
#: A number of bytes, or a counter that runs for months: non-negative, of 60 bits.
Large: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
#: Number of values that a codec stores per row; of 17 bits, so that no matrix is larger than one of the model's.
Numbers: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
#: Seed of a random matrix: non-negative, of 64 bits.
Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
#: A key, or the name of a point, a kind or an encoding.
Label: TypeAlias = Annotated[str, msgspec.Meta(max_length=1 << 12)]
#: A SHA-256 digest; one of another length matches nothing.
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]
#: A path, a reason, an error.
BoundedText: TypeAlias = Annotated[str, msgspec.Meta(max_length=1 << 20)]
#: Rows, vectors, labels.
Data: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MOST_BYTES)]


def in_batches(
    parts: Iterable[Part], bytes_of: Callable[[Part], int], most_bytes: int, most: int | None = None
) -> Iterator[tuple[Part, ...]]:
    """Group parts into batches of bounded size, and of at most `most` parts; a larger part is a batch by itself."""
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
    """Put the header before the body of a frame."""
    return HEADER + body


def read(decoder: msgspec.msgpack.Decoder[Any], frame: object, what: str) -> Any:
    """Decode a frame.

    Args:
        decoder: decoder of its body.
        frame: bytes received.
        what: name of the frame, for the message.

    Raises:
        InvalidFrame: not bytes, longer than `MOST_BYTES`, of another version, damaged, or with a value out of bounds.
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
