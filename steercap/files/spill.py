"""Spill file: a nameless file on disk for rows that do not fit in memory, with a quota and checksums.

Linux creates files that never have a name (O_TMPFILE), so no crash and no `kill -9` can leave one behind: the kernel
frees the file with its last descriptor. All rows share one file, since a process may open few files and have many
handles. Dropped rows are punched out of it, so that the file takes only the disk space of rows in use. On file systems
without O_TMPFILE the file is removed right after its creation. On those that cannot punch holes, the space of dropped
rows is reused, and the file is emptied when no row in it is in use.

Bytes are read into memory and checked there, not mapped: checked bytes cannot change any more, and a failing disk
causes an error of one read instead of a SIGBUS that ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from steercap.errors import CaptureIncomplete, CaptureMemoryFull, InvalidSetting, ModelClosed


class Extent(NamedTuple):
    """Run of consecutive blocks: the first block's number, and the number of blocks."""

    start: int
    length: int


class Extents:
    """Allocator of `total` blocks, which takes the lowest free ones first.

    A request may be split into several extents, so that nothing is lost to fragmentation and no block beyond the
    first `total` is ever used.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._free = [Extent(0, total)] if total else []  # ascending, never adjacent

    @property
    def in_use(self) -> int:
        """Number of allocated blocks."""
        return self.total - self.free

    def take(self, count: int) -> list[Extent] | None:
        """Allocate `count` blocks, in one extent if possible; return the extents, or None if fewer blocks are free."""
        if count > self.free:
            return None
        whole = next((index for index, extent in enumerate(self._free) if extent.length >= count), None)
        taken = []
        while count:
            index = 0 if whole is None else whole
            start, room = self._free[index]
            used = min(room, count)
            taken.append(Extent(start, used))
            self._free[index : index + 1] = [Extent(start + used, room - used)] if room > used else []
            count, self.free = count - used, self.free - used
        return taken

    def give(self, extents: Iterable[Extent]) -> None:
        """Free extents that `take` returned."""
        for start, count in extents:
            index = bisect_left(self._free, (start, 0))
            first, stop = start, start + count
            before = self._free[index - 1] if index else None
            after = self._free[index] if index < len(self._free) else None
            low, high = index, index
            if before is not None and sum(before) == start:
                first, low = before.start, index - 1
            if after is not None and after.start == stop:
                stop, high = sum(after), index + 1
            self._free[low:high] = [Extent(first, stop - first)]
            self.free += count


#: Unit of allocation in bytes: the least that can be punched out of a file.
BLOCK_BYTES: Final = mmap.ALLOCATIONGRANULARITY
#: Maximum bytes written, read and hashed at once: a few milliseconds of a core.
CHUNK_BYTES: Final = 8 << 20
#: Alignment of arrays in bytes, so that they can be viewed as any dtype.
ALIGN: Final = 64
#: Error numbers of file systems without O_TMPFILE; old kernels give EISDIR and ENOENT.
_NO_TMPFILE: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})

Bytes: TypeAlias = npt.NDArray[np.uint8]


class FileRange(NamedTuple):
    """Consecutive bytes of the spill file, with their hash.

    Args:
        offset: position of the first byte in the file.
        size: number of bytes.
        digest: SHA-256 of the bytes, 32 bytes.
    """

    offset: int
    size: int
    digest: bytes


class Stored:
    """Reference to arrays in the spill file; their space is freed when it is garbage-collected.

    Args:
        sizes: size of each array in bytes.
        chunks: byte ranges that hold the arrays, in order; each array starts at a multiple of `ALIGN`.
    """

    def __init__(self, sizes: Sequence[int], chunks: Sequence[FileRange]) -> None:
        self.sizes = tuple(sizes)
        self.chunks = tuple(chunks)


class SpillFile:
    """Spill file with a quota; its methods may be called from any thread.

    Args:
        folder: folder on whose disk the nameless file is created.
        most_bytes: maximum bytes of the file.

    Raises:
        InvalidSetting: no file can be created in `folder`.

    Attributes:
        bytes_written: total bytes written since the file was created.
        closed: True once the file is closed.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.bytes_written = 0
        self.folder = folder
        self.most_bytes = most_bytes
        self._extents = Extents(most_bytes // BLOCK_BYTES)
        self._lock = threading.Lock()
        # Finalizers run at any moment, also of a thread that holds the lock: they may do no more than append.
        self._dropped: list[list[Extent]] = []
        self._stored = 0
        self._fd = nameless_file(folder)
        self._stopped = False
        self.closed = False

    @property
    def name(self) -> str:
        """Description of the file for messages, with the /proc path by which processes of the same user can read it."""
        return f"the spill file in {self.folder} (/proc/{os.getpid()}/fd/{self._fd})"

    @property
    def free_bytes(self) -> int:
        """Bytes of the quota that are free."""
        return self._extents.total * BLOCK_BYTES - self.bytes_in_use

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the quota that are in use, in whole blocks."""
        dropped = sum(extent.length for extents in list(self._dropped) for extent in extents)
        return (self._extents.in_use - dropped) * BLOCK_BYTES

    @property
    def stored(self) -> int:
        """Number of `Stored` references whose arrays are in the file."""
        return self._stored - len(self._dropped)

    @property
    def has_dropped(self) -> bool:
        """True if dropped arrays still take space on disk."""
        return bool(self._dropped)

    def put(self, arrays: Sequence[Bytes], dropped: Callable[[], object] = lambda: None) -> Stored:
        """Write arrays, uint8 [bytes] each, and return a reference to them.

        `dropped` is called when the reference is garbage-collected, from any thread and at any moment.

        Raises:
            CaptureMemoryFull: the quota has no room for the arrays.
            OSError: the arrays cannot be written; they then use no quota.
            ModelClosed: the file was closed.
        """
        sizes = [array.nbytes for array in arrays]
        extents = self._take(-(-needed_bytes(sizes) // BLOCK_BYTES))
        try:
            chunks = list(self._written(arrays, extents))
        except BaseException:
            self._dropped.append(extents)
            raise
        self.bytes_written += sum(chunk.size for chunk in chunks)
        stored = Stored(sizes, chunks)
        weakref.finalize(stored, self._drop, extents, dropped).atexit = False
        return stored

    def reserve(self, size: int, dropped: Callable[[], object] = lambda: None) -> Stored:
        """Reserve `size` bytes of the quota, for bytes that another process writes to its own file.

        They are free again once the returned reference is garbage-collected, which calls `dropped`, as for `put`.

        Raises:
            CaptureMemoryFull: the quota has no room for the bytes.
        """
        extents = self._take(-(-size // BLOCK_BYTES))
        stored = Stored((), ())
        weakref.finalize(stored, self._drop, extents, dropped).atexit = False
        return stored

    def read(self, stored: Stored) -> list[Bytes]:
        """Read stored arrays into new memory and verify their checksums.

        Raises:
            CaptureIncomplete: the bytes differ from those written, or cannot be read.
            ModelClosed: the file was closed.
        """
        whole = np.empty(needed_bytes(stored.sizes), dtype=np.uint8)
        first = 0
        for chunk in stored.chunks:
            self._require_open()
            part = whole[first : first + chunk.size]
            self._read_chunk(chunk, part)
            first += chunk.size
        starts = _starts(stored.sizes)
        return [whole[start : start + size] for start, size in zip(starts, stored.sizes, strict=False)]

    def sweep(self) -> None:
        """Free the disk space of dropped arrays; on some file systems this is slow."""
        with self._lock:
            gone = list(self._dropped)
            extents = sorted(extent for one in gone for extent in one)
            empty = sum(extent.length for extent in extents) == self._extents.in_use
            if not self.closed and empty:
                os.ftruncate(self._fd, 0)
            elif not self.closed:
                self._punch(extents)
            del self._dropped[: len(gone)]
            self._extents.give(extents)
            self._stored -= len(gone)

    def stop(self) -> None:
        """Make running and later reads and writes raise ModelClosed."""
        self._stopped = True

    def close(self) -> None:
        """Close the file and free its space; reads and writes must have ended. Idempotent."""
        self.stop()
        with self._lock:
            if not self.closed:
                self.closed = True
                os.close(self._fd)

    def _take(self, blocks: int) -> list[Extent]:
        self.sweep()
        with self._lock:
            extents = self._extents.take(blocks)
            self._stored += extents is not None
        if extents is None:
            raise CaptureMemoryFull(
                f"{blocks * BLOCK_BYTES:,} bytes need to go to disk, but {self.bytes_in_use:,} of "
                f"spill_bytes={self.most_bytes:,} are in use"
            )
        return extents

    def _written(self, arrays: Sequence[Bytes], extents: Sequence[Extent]) -> Iterator[FileRange]:
        """Write arrays and yield their byte ranges; bytes are copied before hashing, so that they cannot change."""
        left = needed_bytes([array.nbytes for array in arrays])
        scratch = np.empty(min(left, CHUNK_BYTES), dtype=np.uint8)
        pieces = _padded(arrays)
        for start, count in extents:
            offset, stop = start * BLOCK_BYTES, (start + count) * BLOCK_BYTES
            while offset < stop and left:
                self._require_open()
                size = min(stop - offset, left, CHUNK_BYTES)
                chunk = scratch[:size]
                _fill(chunk, pieces)
                digest = hashlib.sha256(chunk.data).digest()
                write_all(self._fd, chunk, offset)
                yield FileRange(offset, size, digest)
                offset, left = offset + size, left - size

    def _read_chunk(self, chunk: FileRange, into: Bytes) -> None:
        try:
            count = read_all(self._fd, into, chunk.offset)
        except OSError as error:
            raise CaptureIncomplete(f"{self.name} cannot be read at byte {chunk.offset:,}: {error}") from error
        if count < chunk.size or hashlib.sha256(into.data).digest() != chunk.digest:
            raise CaptureIncomplete(
                f"{self.name} does not hold what was written at bytes {chunk.offset:,} to "
                f"{chunk.offset + chunk.size:,}: the disk, or another program, has changed it"
            )

    def _drop(self, extents: list[Extent], dropped: Callable[[], object]) -> None:
        self._dropped.append(extents)
        dropped()

    def _punch(self, extents: Sequence[Extent]) -> None:
        """Punch ascending blocks out of the file, adjacent blocks by one call, since there can be thousands."""
        end = os.fstat(self._fd).st_size
        while extents:
            start, length = extents[0]
            count = 1
            while count < len(extents) and extents[count].start == start + length:
                length, count = length + extents[count].length, count + 1
            extents, offset = extents[count:], start * BLOCK_BYTES
            punch(self._fd, offset, min(length * BLOCK_BYTES, end - offset))

    def _require_open(self) -> None:
        """Raise ModelClosed if the file was stopped or closed, as the model's end does."""
        if self._stopped:
            raise ModelClosed("the model was closed while rows were moved to or from disk")


def punch(fd: int, offset: int, size: int) -> None:
    """Free the disk space of `size` bytes of a file from `offset`, a multiple of `BLOCK_BYTES`, on, if it can be."""
    if size > 0:
        with contextlib.suppress(OSError), mmap.mmap(fd, size, offset=offset) as memory:
            memory.madvise(mmap.MADV_REMOVE)


def needed_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that arrays of these sizes in bytes take in the file, each padded to a multiple of `ALIGN`."""
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


def default_folder() -> Path:
    """Return the default folder of spill files: `TMPDIR`, or /var/tmp, which is rarely in memory as /tmp often is."""
    named = os.environ.get("TMPDIR")
    usual = Path("/var/tmp")  # noqa: S108 -- the file has no name there
    if not named and os.access(usual, os.W_OK | os.X_OK):
        return usual
    return Path(tempfile.gettempdir())


def nameless_file(folder: Path) -> int:
    """Create a nameless file on the disk of a folder, open for reading and writing; return its descriptor.

    Raises:
        InvalidSetting: no file can be created there.
    """
    try:
        with contextlib.suppress(_NoTmpfile):
            return _tmpfile(folder)
        fd, path = tempfile.mkstemp(prefix="steercap-spill-", dir=folder)
        Path(path).unlink()
    except OSError as error:
        raise InvalidSetting(f"spill_folder={str(folder)!r}: no file can be made there: {error}") from error
    return fd


class _NoTmpfile(Exception):
    """Error of a file system without O_TMPFILE."""


def _tmpfile(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            raise _NoTmpfile from error
        raise


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    return accumulate((needed_bytes([size]) for size in sizes[:-1]), initial=0)


def _padded(arrays: Sequence[Bytes]) -> deque[Bytes]:
    """Return the arrays, each followed by zeros that pad it to a multiple of `ALIGN` bytes."""
    pieces: deque[Bytes] = deque()
    for array in arrays:
        pieces.extend((array, np.zeros(-array.nbytes % ALIGN, dtype=np.uint8)))
    return pieces


def _fill(chunk: Bytes, pieces: deque[Bytes]) -> None:
    """Move bytes from the front of `pieces` to `chunk` until it is full."""
    filled = 0
    while filled < len(chunk):
        piece = pieces.popleft()
        used = min(len(piece), len(chunk) - filled)
        chunk[filled : filled + used] = piece[:used]
        filled += used
        if used < len(piece):
            pieces.appendleft(piece[used:])


def write_all(fd: int, data: Bytes, offset: int) -> None:
    """Write all bytes, uint8 [bytes], to an open file from byte `offset` on.

    Raises:
        OSError: the disk is full or fails.
    """
    view = data.data
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def read_all(fd: int, into: Bytes, offset: int) -> int:
    """Read an open file from byte `offset` on; return the number of bytes, less than `into` has at the file's end."""
    view = into.data
    while view and (count := os.preadv(fd, [view], offset)):
        view, offset = view[count:], offset + count
    return len(into) - len(view)
