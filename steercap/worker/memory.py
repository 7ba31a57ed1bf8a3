"""Shared memory of a worker, and readers of its lines for the client: through a memory map, or over RPC.

A segment of shared memory is a memfd, mapped by two processes of one machine: it has no name in any file system, is not
bound by the size of /dev/shm (64 MiB in a default container), and the kernel frees it with its last user, even after a
crash. Another process of the same user opens it through /proc/<pid>/fd/<fd>; a nonce at its start proves that it is the
right one. Memory is taken on first touch and returned by `trim`.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from steercap.core.messages import Attached, LineRange
from steercap.core.schema import LINE_BYTES
from steercap.errors import MemoryNotShared, ModelClosed, WorkerFailure
from steercap.worker.chunk_file import read_lines

#: The first page holds the nonce; rows begin behind it.
HEADER_BYTES: Final = mmap.PAGESIZE
NONCE_BYTES: Final = 16
_NAME: Final = "steercap"


class SharedSegment:
    """Shared memory behind a header of `HEADER_BYTES`, mapped into this process.

    `path` opens it in other processes of the same user, and `nonce`, at its start, identifies it; `fd` is its file
    descriptor in the process that created it, None in others.
    """

    def __init__(self, memory: mmap.mmap, path: str, nonce: bytes, fd: int | None) -> None:
        self.memory = memory
        self.path = path
        self.nonce = nonce
        self._fd = fd

    @classmethod
    def create(cls, size: int) -> SharedSegment:
        """Create a segment of `size` bytes behind the header; a page becomes resident when it is first touched."""
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
        """Map a segment of another process of this machine. The mapping is writable, but the caller must not write.

        Args:
            path: `path` of the segment, `/proc/<pid>/fd/<fd>`.
            nonce: the expected bytes at the segment's start.

        Raises:
            MemoryNotShared: the segment cannot be opened or mapped, or its nonce differs.
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


#: Maximum bytes of rows in one RPC: vLLM's message queue copies larger messages over a socket.
WIRE_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Readable:
    """Lines that this process can read until the rows in them are released.

    Args:
        lines: memory that holds the lines, uint8 [lines, LINE_BYTES].
        ranges: the requested ranges, in their order, as ranges of `lines`.
    """

    lines: torch.Tensor
    ranges: tuple[LineRange, ...]


def line_view(segment: SharedSegment) -> torch.Tensor:
    """View the memory of a segment as lines: uint8 [lines, LINE_BYTES]."""
    flat = torch.frombuffer(segment.memory, dtype=torch.uint8, offset=HEADER_BYTES)
    return flat[: len(flat) // LINE_BYTES * LINE_BYTES].view(-1, LINE_BYTES)


class LineReader(ABC):
    """Reader of the lines of one worker's arena.

    Attributes:
        wire_bytes: maximum bytes of one RPC; 0 if the reader uses none.
        wire_bytes_in_flight: bytes requested by the RPC in progress, 0 without one.
    """

    wire_bytes: int = 0
    wire_bytes_in_flight: int = 0

    @abstractmethod
    async def read(self, ranges: Sequence[LineRange]) -> Readable:
        """Make the lines of these ranges, numbered as in the arena, readable in this process."""

    @abstractmethod
    def close(self) -> None:
        """Release the arena: its mapping and its file, if the reader has opened them. Idempotent."""


class SharedReader(LineReader):
    """Reader that maps the arena of a worker on this machine, and opens the worker's file of rows that left memory.

    Raises:
        MemoryNotShared: the arena or the file cannot be opened, as on another machine.
    """

    def __init__(self, attached: Attached) -> None:
        self._segment = SharedSegment.open(attached.path, attached.nonce)
        self._lines: torch.Tensor | None = line_view(self._segment)
        self._file: int | None = None
        if attached.file:
            try:
                self._file = os.open(attached.file, os.O_RDONLY)  # the nonce has proved the process
            except OSError as error:
                raise MemoryNotShared(f"cannot open {attached.file}: {error}") from error
            self._close_file = weakref.finalize(self, os.close, self._file)

    async def read(self, ranges: Sequence[LineRange]) -> Readable:
        lines, file, parts = self._open_lines(), self._file, list[torch.Tensor]()
        if file is None or not any(item.start >= len(lines) for item in ranges):
            return Readable(lines, tuple(ranges))
        for item in ranges:
            try:
                parts.append(await asyncio.to_thread(read_lines, file, item.start - len(lines), item.count))
            except WorkerFailure:
                self._open_lines()
                raise
            self._open_lines()  # closed meanwhile, the file's number may have been another's
        return Readable(torch.cat(parts), (LineRange(0, sum(map(len, parts))),))

    def _open_lines(self) -> torch.Tensor:
        """Return the mapped lines of the arena: uint8 [lines, LINE_BYTES].

        Raises:
            ModelClosed: the reader was closed.
        """
        if self._lines is None:
            raise ModelClosed("the model was closed while rows were fetched")
        return self._lines

    def close(self) -> None:
        self._lines = None
        if self._file is not None:
            self._close_file()
        self._segment.close()


class WireReader(LineReader):
    """Reader that fetches lines over RPC, at most `WIRE_BYTES` at a time; concurrent reads wait for each other.

    Args:
        ask: coroutine function that sends ranges to the worker and returns their bytes.

    Raises:
        WorkerFailure: raised by `read` if the number of bytes received differs from that requested.
    """

    def __init__(self, ask: Callable[[tuple[LineRange, ...]], Awaitable[bytes]]) -> None:
        self._ask = ask
        self._turn = asyncio.Lock()
        self.wire_bytes = WIRE_BYTES

    async def read(self, ranges: Sequence[LineRange]) -> Readable:
        async with self._turn:  # else the bytes of many requests would pile up here, waiting to be gathered
            count = sum(item.count for item in ranges)
            lines = torch.empty((count, LINE_BYTES), dtype=torch.uint8)
            first = 0
            for group in _grouped(ranges, max(1, WIRE_BYTES // LINE_BYTES)):
                sent = np.frombuffer(await self._sent(group), dtype=np.uint8).reshape(-1, LINE_BYTES)
                lines[first : first + len(sent)].numpy()[:] = sent
                first += len(sent)
        return Readable(lines[:first], (LineRange(0, count),))

    async def _sent(self, ranges: tuple[LineRange, ...]) -> bytes:
        wanted = self.wire_bytes_in_flight = sum(item.count for item in ranges) * LINE_BYTES
        try:
            data = await self._ask(ranges)
            if len(data) != wanted:
                raise WorkerFailure(f"{len(data):,} bytes of rows came where {wanted:,} were asked for")
            return data
        finally:
            self.wire_bytes_in_flight = 0

    def close(self) -> None:
        return None


def open_reader(
    attached: Attached, transport: str, ask: Callable[[tuple[LineRange, ...]], Awaitable[bytes]]
) -> LineReader:
    """Open a reader of one worker's arena.

    Args:
        attached: description of the worker's arena.
        transport: "shared" (a memory map), "wire" (RPC), or "auto": shared where possible.
        ask: coroutine function that sends ranges to the worker and returns their bytes.

    Raises:
        MemoryNotShared: `transport` is "shared", and the arena cannot be mapped.
    """
    if transport == "wire":
        return WireReader(ask)
    try:
        return SharedReader(attached)
    except MemoryNotShared:
        if transport == "shared":
            raise
        return WireReader(ask)


def _grouped(ranges: Iterable[LineRange], most: int) -> Iterable[tuple[LineRange, ...]]:
    """Group line ranges, in order, into groups of `most` lines; a range that crosses the end of a group is split."""
    group: list[LineRange] = []
    room = most
    for item in ranges:
        start, stop = item.start, item.start + item.count
        while start < stop:
            count = min(room, stop - start)
            group.append(LineRange(start, count))
            start, room = start + count, room - count
            if not room:
                yield tuple(group)
                group, room = [], most
    if group:
        yield tuple(group)
