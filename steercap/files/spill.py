"""A file without a name in which rows wait: under a quota, checked by hash, gone with the process that made it.

Linux makes a file that never had a name (O_TMPFILE), so no crash and no `kill -9` can leave one behind: the kernel
frees it with its last descriptor. All rows share one such file, since a process may have few files open and many
handles. What is dropped is punched out of it, so that it takes the disk space of what is in use. On file systems that
have no O_TMPFILE the file is removed right after it was made; on those that cannot punch holes, what is dropped is
used again, and the whole file is emptied when nothing in it is in use.

Bytes are read into memory and checked there, rather than mapped: what was checked cannot change any more, and a disk
that fails is an error of one read rather than a SIGBUS that ends the process.
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from steercap.core.extents import Extent, Extents
from steercap.errors import CaptureIncomplete, CaptureMemoryFull, InvalidSetting, ModelClosed

#: What space is handed out in: the least that can be punched out of a file.
BLOCK_BYTES: Final = mmap.ALLOCATIONGRANULARITY
#: Most bytes that are written, read and hashed in one go: a few milliseconds of a core.
CHUNK_BYTES: Final = 8 << 20
#: What arrays begin at a multiple of, so that any dtype can be viewed in them.
ALIGN: Final = 64
#: What a file system answers that has no O_TMPFILE; EISDIR and ENOENT are those of old kernels.
_NO_TMPFILE: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Chunk(NamedTuple):
    """Consecutive bytes of the file.

    Args:
        offset: of the first.
        size: how many.
        digest: their SHA-256.
    """

    offset: int
    size: int
    digest: bytes


class Stored:
    """Arrays that are in the file; dropped with the last reference, they make room.

    Args:
        sizes: bytes of each array.
        chunks: where they are, one after the other, each on a multiple of `ALIGN`.
    """

    def __init__(self, sizes: Sequence[int], chunks: Sequence[Chunk]) -> None:
        self.sizes = tuple(sizes)
        self.chunks = tuple(chunks)


class SpillFile:
    """The file; all that touches it may be called from any thread.

    Args:
        folder: where it is made.
        most_bytes: the most that it may hold.

    Raises:
        InvalidSetting: no file can be made there.

    Attributes:
        bytes_written: what was written since it was made.
        closed: whether it is gone.
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
        self._fd = _made_in(folder)
        self._stopped = False
        self.closed = False

    @property
    def name(self) -> str:
        """How messages name it, and where other processes of its user can look at it."""
        return f"the spill file in {self.folder} (/proc/{os.getpid()}/fd/{self._fd})"

    @property
    def free_bytes(self) -> int:
        """What there is room for."""
        return self._extents.total * BLOCK_BYTES - self.bytes_in_use

    @property
    def bytes_in_use(self) -> int:
        """What is taken of the quota, in whole blocks."""
        dropped = sum(extent.length for extents in list(self._dropped) for extent in extents)
        return (self._extents.in_use - dropped) * BLOCK_BYTES

    @property
    def stored(self) -> int:
        """How many are in it."""
        return self._stored - len(self._dropped)

    def put(self, arrays: Sequence[Bytes], dropped: Callable[[], object] = lambda: None) -> Stored:
        """Write arrays, uint8 [bytes] each.

        Args:
            arrays: what to write.
            dropped: called when it is dropped, from any thread, in the middle of anything.

        Raises:
            CaptureMemoryFull: the quota has no room for them.
            OSError: they cannot be written; then they take no room.
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

    def read(self, stored: Stored) -> list[Bytes]:
        """The arrays, in memory of their own.

        Raises:
            CaptureIncomplete: the file does not hold what was written.
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
        """Punch out of the file what was dropped; a file system may take its time for that."""
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
        """Let whoever reads or writes end soon, with ModelClosed."""
        self._stopped = True

    def close(self) -> None:
        """Give all of it back; whoever reads or writes must have ended. Idempotent."""
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
                f"{blocks * BLOCK_BYTES:,} bytes are to go to disk, and of spill_bytes={self.most_bytes:,} "
                f"{self.bytes_in_use:,} are in use"
            )
        return extents

    def _written(self, arrays: Sequence[Bytes], extents: Sequence[Extent]) -> Iterator[Chunk]:
        """Write arrays chunk by chunk, each out of memory that nobody changes after it was hashed."""
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
                _write_all(self._fd, chunk, offset)
                yield Chunk(offset, size, digest)
                offset, left = offset + size, left - size

    def _read_chunk(self, chunk: Chunk, into: Bytes) -> None:
        try:
            count = _read_all(self._fd, into, chunk.offset)
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
        """Take blocks out of the file, ascending; neighbours at once, since there can be thousands."""
        end = os.fstat(self._fd).st_size
        while extents:
            start, length = extents[0]
            count = 1
            while count < len(extents) and extents[count].start == start + length:
                length, count = length + extents[count].length, count + 1
            extents, offset = extents[count:], start * BLOCK_BYTES
            size = min(length * BLOCK_BYTES, end - offset)
            if size > 0:
                with contextlib.suppress(OSError), mmap.mmap(self._fd, size, offset=offset) as memory:
                    memory.madvise(mmap.MADV_REMOVE)

    def _require_open(self) -> None:
        if self._stopped:
            raise ModelClosed("the model was closed while rows were moved to or from disk")


def needed_bytes(sizes: Sequence[int]) -> int:
    """Bytes that arrays of these sizes take, one after the other."""
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


def default_folder() -> Path:
    """Where spill files are made unless it is said: `TMPDIR`, or /var/tmp, which is seldom memory as /tmp often is."""
    named = os.environ.get("TMPDIR")
    usual = Path("/var/tmp")  # noqa: S108 -- the file has no name there
    if not named and os.access(usual, os.W_OK | os.X_OK):
        return usual
    return Path(tempfile.gettempdir())


def _made_in(folder: Path) -> int:
    """A new file without a name, open.

    Raises:
        InvalidSetting: none can be made there.
    """
    try:
        with contextlib.suppress(_Lacking):
            return _tmpfile(folder)
        fd, path = tempfile.mkstemp(prefix="steercap-spill-", dir=folder)
        Path(path).unlink()
    except OSError as error:
        raise InvalidSetting(f"spill_folder={str(folder)!r}: no file can be made there: {error}") from error
    return fd


class _Lacking(Exception):
    """The file system has no O_TMPFILE."""


def _tmpfile(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            raise _Lacking from error
        raise


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    return accumulate((needed_bytes([size]) for size in sizes[:-1]), initial=0)


def _padded(arrays: Sequence[Bytes]) -> deque[Bytes]:
    """Arrays, each up to a multiple of `ALIGN`."""
    pieces: deque[Bytes] = deque()
    for array in arrays:
        pieces.extend((array, np.zeros(-array.nbytes % ALIGN, dtype=np.uint8)))
    return pieces


def _fill(chunk: Bytes, pieces: deque[Bytes]) -> None:
    """Fill a chunk with the next bytes of the pieces."""
    filled = 0
    while filled < len(chunk):
        piece = pieces.popleft()
        used = min(len(piece), len(chunk) - filled)
        chunk[filled : filled + used] = piece[:used]
        filled += used
        if used < len(piece):
            pieces.appendleft(piece[used:])


def _write_all(fd: int, data: Bytes, offset: int) -> None:
    view = data.data
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _read_all(fd: int, into: Bytes, offset: int) -> int:
    view = into.data
    while view and (count := os.preadv(fd, [view], offset)):
        view, offset = view[count:], offset + count
    return len(into) - len(view)
