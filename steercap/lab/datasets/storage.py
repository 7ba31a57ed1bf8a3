"""Where a data set lies: a local folder, or a folder of an fsspec file system (`lab/datasets/remote.py`).

Nothing else opens its files. Each appears whole or not at all: locally under its name once its bytes are on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np

from steercap.errors import InvalidFile, InvalidRequest
from steercap.files.base import sweep, write_whole

#: Bytes read at once of a file that is hashed or copied.
CHUNK: Final = 4 << 20
#: What is written: bytes, or an array of them.
Buffer: TypeAlias = "bytes | memoryview"


class FileReceipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a file that was written: its bytes, and their SHA-256 in hexadecimal."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Writable(Protocol):
    def write(self, data: Any, /) -> Any: ...


class Storage(ABC):
    """A folder of files by name, such as "shards/000000.json". Methods may be called from any thread."""

    @abstractmethod
    def path(self, name: str) -> str:
        """A file's full name, for messages."""

    @abstractmethod
    def write(self, name: str, chunks: Iterable[Buffer]) -> FileReceipt:
        """Write a file, whole and durable, or not at all; one of that name is replaced.

        Raises:
            OSError: it cannot be written, such as on a full disk.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """What a file holds.

        Raises:
            InvalidFile: it is missing, or cannot be read.
        """

    @abstractmethod
    def sizes(self, folder: str = "") -> dict[str, int]:
        """The files of a folder by name, those in folders below aside, with their bytes; none if it is not there."""

    @abstractmethod
    def sha256(self, name: str) -> str:
        """SHA-256 of a file, in hexadecimal.

        Raises:
            InvalidFile: it is missing, or cannot be read.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def fetched(self, name: str) -> AbstractContextManager[Path]:
        """A path on this machine, within the block, at which a file can be mapped into memory; what is mapped stays.

        Raises:
            InvalidFile: it is missing, or cannot be fetched.
        """

    @abstractmethod
    def sweep(self) -> None:
        """Remove what killed processes had begun to write."""

    def __str__(self) -> str:
        return self.path("").rstrip("/")


class Direct:
    """A file of which whole pages go to the disk past the page cache, if its file system can do that.

    A data set is mostly larger than memory, and would take all of it from everybody; memory that nobody has used
    before costs a virtual machine more than its disk does.

    Args:
        file: to write to, not buffered.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._flags = fcntl.fcntl(file, fcntl.F_GETFL)
        self._can, self._direct = True, False

    def write(self, data: memoryview) -> int:
        """Write bytes in whole pages of memory; what is less, the end of a file, goes through the page cache."""
        try:
            self._pass_cache(self._can and not len(data) % mmap.PAGESIZE)
            return self._file.write(data)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._can:
                raise
            self._can = False
            return self.write(data)

    def _pass_cache(self, asked: bool) -> None:
        if asked != self._direct:
            fcntl.fcntl(self._file, fcntl.F_SETFL, self._flags | os.O_DIRECT if asked else self._flags)
            self._direct = asked


class LocalFolder(Storage):
    """A folder of this machine; it is made when something is written.

    Args:
        folder: its path.

    Raises:
        InvalidRequest: its name is not UTF-8: neither safetensors nor pyarrow could open what is in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        try:
            str(self._folder).encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the folder {str(folder)!a} has a name that is not UTF-8; give another") from error

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def write(self, name: str, chunks: Iterable[Buffer]) -> FileReceipt:
        target = self._folder / name
        with write_whole(target) as scratch, scratch.open("wb", buffering=0) as file:
            receipt = copied(chunks, Direct(file))
            os.fsync(file.fileno())
        _sync_folder(target.parent)
        return receipt

    def read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError as error:
            raise unreadable(self.path(name), error) from error

    def sizes(self, folder: str = "") -> dict[str, int]:
        try:
            found = os.scandir(self._folder / folder)
        except FileNotFoundError:
            return {}
        sizes: dict[str, int] = {}
        with found:
            for entry in found:
                with suppress(FileNotFoundError):  # one that is renamed meanwhile, as every file is that is written
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def sha256(self, name: str) -> str:
        try:
            with (self._folder / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(self.path(name), error) from error

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    @contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        yield self._folder / name

    def sweep(self) -> None:
        sweep(self._folder)


def unreadable(path: str, error: OSError) -> InvalidFile:
    """The error for a file that cannot be read."""
    return InvalidFile(
        f"{path} cannot be read: {error.strerror or error}; copy the data set again, or collect it again"
    )


def copied(chunks: Iterable[Buffer], file: _Writable) -> FileReceipt:
    """Write chunks one after another; what they are hashed by lets other threads run.

    Args:
        chunks: bytes, none of which is kept.
        file: to write to; it takes bytes that change once it has written them.
    """
    digest, size = hashlib.sha256(), 0
    for part in _parts(chunks):
        digest.update(part)
        _write_all(file, part)
        size += len(part)
    return FileReceipt(size, digest.hexdigest())


def _parts(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    """The same bytes, in parts of CHUNK but for the last: each is a wait for Python's lock, which others have.

    They are put together in one piece of memory, whole pages of it, which the next part takes: NumPy copies without the
    lock, and fresh memory for every part would cost as much as the copy.
    """
    memory = mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # or a fork while it is written past the page cache may change what is written
    together = np.frombuffer(memory, dtype=np.uint8)
    held = 0
    for chunk in chunks:
        rest = np.frombuffer(chunk, dtype=np.uint8)
        while rest.size:
            taken, rest = rest[: CHUNK - held], rest[CHUNK - held :]
            together[held : held + taken.size] = taken
            held += taken.size
            if held == CHUNK:
                yield memoryview(memory)
                held = 0
    if held:
        yield memoryview(memory)[:held]


def _write_all(file: _Writable, part: memoryview) -> None:
    while len(part):
        written = file.write(part)
        part = part[len(part) if written is None else written :]


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
