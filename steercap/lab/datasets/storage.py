"""Storage of a data set's files: a local folder with one writer, or a folder of an fsspec file system.

All access to a data set's files is through a `Storage`. Writes are atomic: a local file gets its name once its bytes
are on the disk.
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
from typing import Annotated, Any, Final, Protocol

import msgspec
import numpy as np

from steercap.errors import InvalidFile, InvalidRequest
from steercap.files.base import sweep, write_whole
from steercap.files.fingerprint import nearest_path
from steercap.files.tensors import Buffer

#: Maximum bytes of a file that are hashed or copied at once.
CHUNK: Final = 4 << 20


class FileReceipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Receipt of a written file: its size in bytes, and its SHA-256 in hexadecimal."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Writable(Protocol):
    def write(self, data: Any, /) -> Any: ...


class Storage(ABC):
    """Folder of files, addressed by names within it, such as "shards/000000.json"; usable from any thread."""

    @abstractmethod
    def path(self, name: str) -> str:
        """Return the full path or URL of a file, for error messages; the file need not exist."""

    @abstractmethod
    def write(self, name: str, chunks: Iterable[Buffer]) -> FileReceipt:
        """Write chunks of bytes as a file, atomically and durably, replacing any of that name; return size and SHA-256.

        Raises:
            OSError: the file cannot be written, such as on a full disk.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the contents of a file.

        Raises:
            InvalidFile: the file is missing, or cannot be read.
        """

    @abstractmethod
    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the sizes in bytes of a folder's files, without subfolders; {} if the folder does not exist."""

    @abstractmethod
    def sha256(self, name: str) -> str:
        """Return the SHA-256 of a file, in hexadecimal.

        Raises:
            InvalidFile: the file is missing, or cannot be read.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""

    @abstractmethod
    def fetched(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local path to memory-map a file from; mappings made in the block stay valid after it.

        Raises:
            InvalidFile: the file is missing, or cannot be fetched.
        """

    @abstractmethod
    def sweep(self) -> None:
        """Remove files that killed processes left half-written."""

    def __str__(self) -> str:
        return self.path("").rstrip("/")


class Direct:
    """File writer that bypasses the page cache with O_DIRECT, since a data set would displace all else in it.

    Writes that are no whole number of pages, and all writes on a file system without O_DIRECT, go through the cache.

    Args:
        file: file to write to, unbuffered; the caller closes it.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._flags = fcntl.fcntl(file, fcntl.F_GETFL)
        self._can, self._direct = True, False

    def write(self, data: memoryview) -> int:
        """Write bytes, past the page cache if they are a whole number of pages; return how many were written."""
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
    """Storage in a folder on this machine; the first write creates it.

    Raises:
        InvalidRequest: the path is not UTF-8: neither safetensors nor pyarrow could open files in it.
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
    """Return the error to raise for a file that cannot be read: the reason, and the most similar path."""
    reason = error.strerror or error
    if isinstance(error, FileNotFoundError) and "://" not in path:
        reason = f"there is no such file{nearest_path(path)}"
    return InvalidFile(f"{path} cannot be read: {reason}; copy the data set again, or collect it again")


def copied(chunks: Iterable[Buffer], file: _Writable) -> FileReceipt:
    """Write chunks to `file` one after another; return their total size and SHA-256. Other threads run meanwhile.

    Args:
        chunks: chunks of bytes; none is kept.
        file: file to write to, in parts of at most `CHUNK` bytes; the memory of a part is reused after each write.
    """
    digest, size = hashlib.sha256(), 0
    for part in _parts(chunks):
        digest.update(part)
        _write_all(file, part)
        size += len(part)
    return FileReceipt(size, digest.hexdigest())


def _parts(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yield the bytes of all chunks in parts of CHUNK bytes, the last one shorter: each costs one wait for the GIL.

    All parts share one page-aligned buffer, which the next part overwrites: NumPy copies without the lock, and fresh
    memory for every part would cost as much as the copy.
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
    """Make new and renamed files of a folder durable: fsync the folder itself."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
