"""Anonymous shared memory: a segment mapped by two processes of one machine, freed even after a crash.

The segment is a memfd: it has no name in any file system, is not bound by the size of /dev/shm (64 MiB in a default
container), and the kernel frees it with its last user. Another process of the same user opens it through
/proc/<pid>/fd/<fd>; a nonce at its start proves that it is the right one. Memory is taken on first touch and
returned by `trim`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from typing import Final

from steercap.errors import MemoryNotShared

#: The first page holds the nonce; rows begin behind it.
HEADER_BYTES: Final = mmap.PAGESIZE
NONCE_BYTES: Final = 16
_NAME: Final = "steercap"


class SharedSegment:
    """Shared memory of `size` bytes behind a header, mapped into this process."""

    def __init__(self, memory: mmap.mmap, path: str, nonce: bytes, fd: int | None) -> None:
        self.memory = memory
        self.path = path
        self.nonce = nonce
        self._fd = fd

    @classmethod
    def create(cls, size: int) -> SharedSegment:
        """Create a segment; its pages become resident when they are touched."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, HEADER_BYTES + size)
            memory = mmap.mmap(fd, HEADER_BYTES + size)
        except BaseException:
            os.close(fd)
            raise
        nonce = secrets.token_bytes(NONCE_BYTES)
        memory[:NONCE_BYTES] = nonce
        return cls(memory, f"/proc/{os.getpid()}/fd/{fd}", nonce, fd)

    @classmethod
    def open(cls, path: str, nonce: bytes) -> SharedSegment:
        """Map a segment of another process of this machine. The mapping is writable, and the caller must not write.

        Args:
            path: its `path`, `/proc/<pid>/fd/<fd>`.
            nonce: the bytes at its start.

        Raises:
            MemoryNotShared: it cannot be opened or mapped, or its nonce is another one.
        """
        try:
            # If the other process is on another machine, its number may be that of any process here. That one's files
            # must not be opened: some, like terminals and devices, react to it.
            if not os.readlink(path).startswith(f"/memfd:{_NAME} "):  # noqa: PTH115
                raise MemoryNotShared(f"{path} is not the segment that was announced")
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            raise MemoryNotShared(f"cannot open {path}: {error}") from error
        try:
            memory = mmap.mmap(fd, 0)
        except (OSError, ValueError) as error:
            raise MemoryNotShared(f"cannot map {path}: {error}") from error
        finally:
            os.close(fd)
        if memory[:NONCE_BYTES] != nonce:
            memory.close()
            raise MemoryNotShared(f"{path} is not the segment that was announced")
        return cls(memory, path, nonce, None)

    def trim(self, start: int, stop: int) -> None:
        """Return the memory of bytes [start, stop) behind the header to the system; they read as zero afterwards."""
        first = -(-(HEADER_BYTES + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (HEADER_BYTES + stop) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self.memory.madvise(mmap.MADV_REMOVE, first, last - first)

    def close(self) -> None:
        """Unmap the segment; while tensors still use its memory, the unmapping waits for the last of them."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        with contextlib.suppress(BufferError):
            self.memory.close()
