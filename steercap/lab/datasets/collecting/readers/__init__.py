"""Corpus readers by file format: base class and registry.

To add one, add an entry to a file's `MEMBERS`, or a file with a `MEMBER`.
"""

from __future__ import annotations

import abc
import gzip
import io
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

from steercap.core.extras import extra
from steercap.core.registry import Registry
from steercap.errors import InvalidFile

#: Unit that is one document in a text file.
Unit = Literal["line", "file", "paragraph"]
#: Maximum bytes of one document, uncompressed: a file without line ends is not a corpus.
MOST_BYTES: Final = 256 << 20
#: Suffixes of compressed files.
PACKED: Final = (".gz", ".zst")
#: Keys of the document in a record, tried in this order if no column is named.
KEYS: Final = ("text", "messages", "tokens")
#: Number of a table's rows that are converted to Python objects at once.
RECORDS: Final = 256


class Bad(NamedTuple):
    """Placeholder for an unreadable item, with the reason."""

    reason: str


class FileItem(NamedTuple):
    """Item of a file.

    Args:
        place: place in the file: "line 5".
        item: decoded value, or `Bad` if it is unreadable.
        bytes: bytes of the file on disk read so far.
    """

    place: str
    item: Any
    bytes: int


@dataclass(frozen=True)
class ReaderSettings:
    """Settings for reading files of any format.

    Args:
        column: key or column of documents in records; None for the default ones, see `content_of`.
        unit: unit that is one document in a text file.
    """

    column: str | None = None
    unit: Unit = "line"


class Reader(abc.ABC):
    """Reader of one file format; streams files, if their format allows it."""

    #: Suffixes of the names of files in this format, without those of compression.
    suffixes: tuple[str, ...]

    @abc.abstractmethod
    def items(self, path: Path, settings: ReaderSettings) -> Iterator[FileItem]:
        """Yield the items of a file (lines, rows or texts) in order, each with its place.

        Raises:
            InvalidFile: the file cannot be read to its end.
        """

    def count(self, path: Path) -> int | None:  # noqa: ARG002 -- what any of them needs
        """Return the number of documents that a file states, or None if its format states none."""
        return None

    def reads(self, path: Path) -> bool:
        """Return whether a file's name has a suffix of this format, perhaps followed by one of compression."""
        name = path.name.lower()
        for packed in PACKED:
            name = name.removesuffix(packed)
        return name.endswith(self.suffixes)


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Yield a file's content as a decompressed stream, and a function that returns the bytes on disk read so far.

    Raises:
        InvalidFile: the file cannot be read, or is truncated or damaged.
    """
    try:
        with path.open("rb") as raw, _opened(path, raw) as found:
            _require_begun(path)
            yield found, raw.tell
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise InvalidFile(f"{path} cannot be read: {error}; fetch it again, or leave it out") from error


def _require_begun(path: Path) -> None:
    """Check that a compressed file is not empty; raise EOFError if it is."""
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
    """Yield each non-empty line as its number from 1, its bytes without line end, and the bytes on disk read so far.

    A byte order mark at the start of the file is dropped.

    Raises:
        InvalidFile: the file cannot be read, or a line is longer than `MOST_BYTES`.
    """
    number = 0
    with unpacked(path) as (content, at):
        while line := content.readline(MOST_BYTES):
            number += 1
            if len(line) == MOST_BYTES:
                raise InvalidFile(
                    f"{path}, line {number} is longer than {MOST_BYTES:,} bytes, the most that is read as one line"
                )
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if stripped := line.rstrip(b"\r\n"):
                yield number, stripped, at()


def utf8(data: bytes) -> str | Bad:
    """Decode UTF-8; for invalid bytes, return `Bad` with the reason."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def values_of(column: Any) -> list[Any]:
    """Return the values of an Arrow column as Python objects, with `Bad` for texts that are not UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value_of(one) for one in column]


def half_of_pair(error: UnicodeEncodeError) -> str:
    """Return the reason to refuse a text with an unpaired surrogate, which UTF-8 cannot encode."""
    return f"{error.object[error.start]!r} is half of a surrogate pair, which is not text"


def _value_of(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def _not_utf8(error: UnicodeDecodeError) -> Bad:
    return Bad(f"not UTF-8: {error.reason} at byte {error.start}")


READERS: Registry[Reader] = Registry("format", sys.modules[__name__], Reader)
