"""What reads one kind of file, and what all of them share."""

from __future__ import annotations

import abc
import gzip
import io
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

from steercap.core.extras import extra
from steercap.errors import InvalidFile

#: What a text file is cut into.
Unit = Literal["line", "file", "paragraph"]
#: Bytes of one document, unpacked: a file that has no ends of lines is none of documents.
MOST_BYTES: Final = 256 << 20
#: Suffixes of packed files.
PACKED: Final = (".gz", ".zst")
#: What holds a document in a record, looked for in this order where no column is named.
KEYS: Final = ("text", "messages", "tokens")
#: Records that are taken out of a table at once.
RECORDS: Final = 256


class Bad(NamedTuple):
    """In the place of an item: why it cannot be read."""

    reason: str


class Found(NamedTuple):
    """One item of a file.

    Args:
        place: in the file: "line 5".
        item: what is there, or `Bad`.
        bytes: of the file that were read up to here, as it lies on disk.
    """

    place: str
    item: Any
    bytes: int


@dataclass(frozen=True)
class Asked:
    """How files are read.

    Args:
        column: what records are looked up by; None for what `content_of` looks for.
        unit: what a text file is cut into.
    """

    column: str | None = None
    unit: Unit = "line"


class Reader(abc.ABC):
    """Reads files of one kind; of each no more than it must at a time."""

    #: How the names of such files end.
    suffixes: tuple[str, ...]

    @abc.abstractmethod
    def items(self, path: Path, asked: Asked) -> Iterator[Found]:
        """What a file holds, in its order.

        Raises:
            InvalidFile: it cannot be read, or not on to its end.
        """

    def count(self, path: Path) -> int | None:  # noqa: ARG002 -- what any of them needs
        """How many documents a file says it holds, None where it does not say."""
        return None

    def reads(self, path: Path) -> bool:
        """Whether it reads files of this name."""
        name = path.name.lower()
        for packed in PACKED:
            name = name.removesuffix(packed)
        return name.endswith(self.suffixes)


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """A file's bytes, unpacked, and how many of them as they lie on disk were read.

    Raises:
        InvalidFile: it cannot be read, or is truncated or damaged.
    """
    try:
        with path.open("rb") as raw, _opened(path, raw) as found:
            _require_begun(path)
            yield found, raw.tell
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise InvalidFile(f"{path} cannot be read: {error}; fetch it again, or leave it out") from error


def _require_begun(path: Path) -> None:
    """What is packed is never empty."""
    if path.suffix.lower() in PACKED and not path.stat().st_size:
        raise EOFError("it is empty")


@contextmanager
def _opened(path: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    match path.suffix.lower():
        case ".gz":
            with gzip.open(raw) as found:
                yield found  # type: ignore[misc]
        case ".zst":
            with extra("datasets"):
                import pyarrow as pa
            with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd") as stream:
                yield io.BufferedReader(stream, 1 << 20)
        case _:
            yield raw


def lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Lines that are not empty, with their numbers from 1, and the bytes of the file that were read so far.

    The byte order mark that a file may begin with is none of its first line's.

    Raises:
        InvalidFile: it cannot be read, or a line is longer than `MOST_BYTES`.
    """
    number = 0
    with unpacked(path) as (content, at):
        while line := content.readline(MOST_BYTES):
            number += 1
            if len(line) == MOST_BYTES:
                raise InvalidFile(f"{path}, line {number} is longer than {MOST_BYTES:,} bytes: no line of a corpus")
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if stripped := line.rstrip(b"\r\n"):
                yield number, stripped, at()


def utf8(data: bytes) -> str | Bad:
    """A text, or why it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def values_of(column: Any) -> list[Any]:
    """The values of a column of Arrow's, `Bad` in the place of those that are not UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value_of(one) for one in column]


def half_of_pair(error: UnicodeEncodeError) -> str:
    """What to say of a text that UTF-8 does not hold."""
    return f"{error.object[error.start]!r} is half of a surrogate pair, and no text"


def _value_of(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def _not_utf8(error: UnicodeDecodeError) -> Bad:
    return Bad(f"not UTF-8: {error.reason} at byte {error.start}")
