"""Readers of a worker's lines for the client: through a memory map, or over RPC."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from steercap.core.messages import Attached, LineRange
from steercap.core.records import LINE_BYTES
from steercap.errors import MemoryNotShared, ModelClosed, WorkerFailure
from steercap.worker.memory.shared import HEADER_BYTES, SharedSegment

#: Maximum bytes of one RPC: vLLM's message queue copies larger messages over a socket.
WIRE_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Readable:
    """Lines that can be read in this process until their rows are released.

    Args:
        lines: memory that holds them, uint8 [lines, LINE_BYTES].
        ranges: the ranges asked for, as ranges of `lines`, in their order.
    """

    lines: torch.Tensor
    ranges: tuple[LineRange, ...]


class LineReader(ABC):
    """Reader of the lines of one worker's arena.

    Attributes:
        wire_bytes: maximum bytes of one RPC; 0 where nothing is sent.
        wire_bytes_in_flight: bytes asked for in the RPC under way.
    """

    wire_bytes: int = 0
    wire_bytes_in_flight: int = 0

    @abstractmethod
    async def read(self, ranges: Sequence[LineRange]) -> Readable:
        """Make the lines of these ranges readable in this process."""

    @abstractmethod
    def close(self) -> None:
        """Release the arena."""


class SharedReader(LineReader):
    """Reader that maps the arena into this process.

    Raises:
        MemoryNotShared: the arena is on another machine.
    """

    def __init__(self, attached: Attached) -> None:
        self._segment = SharedSegment.open(attached.path, attached.nonce)
        flat = torch.frombuffer(self._segment.memory, dtype=torch.uint8, offset=HEADER_BYTES)
        self._lines: torch.Tensor | None = flat[: len(flat) // LINE_BYTES * LINE_BYTES].view(-1, LINE_BYTES)

    async def read(self, ranges: Sequence[LineRange]) -> Readable:
        if self._lines is None:
            raise ModelClosed("the model was closed while rows were fetched")
        return Readable(self._lines, tuple(ranges))

    def close(self) -> None:
        self._lines = None
        self._segment.close()


class WireReader(LineReader):
    """Reader that fetches lines over RPC, at most `WIRE_BYTES` at a time; concurrent reads wait for each other.

    Args:
        ask: coroutine function that sends ranges to the worker and returns their bytes.

    Raises:
        WorkerFailure: by `read`, the number of bytes received differs from that requested.
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
        attached: the worker's arena.
        transport: "shared", "wire", or "auto": shared where it can be.
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
    """Group line ranges, in their order, by `most` lines; larger ranges are split."""
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
