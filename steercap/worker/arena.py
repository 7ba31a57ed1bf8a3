"""Arena of captured rows: lines of shared memory, allocated in pages.

On CPU taps write into the shared memory itself, which the client reads: nothing is copied in between. On CUDA the
memory is pinned, and each pass's rows are copied there from the device. A request's pages hold
its records in the order of its rows; `core.schema` lays a record out.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.rows import Ints, PageAllocator, PageShape
from steercap.core.schema import LINE_BYTES
from steercap.errors import InvalidSetting, WorkerFailure
from steercap.worker.chunk_file import ChunkFile
from steercap.worker.memory import HEADER_BYTES, SharedSegment

_LOG: Final = logging.getLogger(__name__)
#: Line numbers of the file of rows that left memory, as a multiple of the lines that it may hold: it is sparse, and a
#: request's rows lie together, so that those that end in between leave no gaps in which nothing fits.
SPARSE: Final = 16
#: Maximum number of lines that a message can name.
MOST_LINES: Final = (1 << 32) - 1
#: Memory that stays resident while nothing is captured, so that short requests do not fault pages in anew.
WARM_BYTES: Final = 64 << 20
#: Block size, in bytes, of reads that are moved to a device.
BUS_BYTES: Final = 64 << 20


class Arena:
    """Arena of captured rows: lines in shared memory, allocated in pages.

    Args:
        shape: size of a page, in lines.
        capture_bytes: maximum bytes of the arena.
        device: the model's device; on CUDA all of the memory is pinned for as long as the arena lives.

    Raises:
        WorkerFailure: there is not room for a page, or the memory cannot be pinned.
    """

    def __init__(self, shape: PageShape, capture_bytes: int, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        pages = capture_bytes // shape.page_bytes
        if not pages:
            raise WorkerFailure(
                f"capture_bytes={capture_bytes} is less than one page of rows; give at least {shape.page_bytes:,}"
            )
        self.pages = PageAllocator(pages)
        self.segment = SharedSegment.create(pages * shape.page_bytes)
        #: All lines: uint8 [lines, LINE_BYTES].
        self.lines = line_view(self.segment)
        #: File of the lines behind those of the memory, or None.
        self.file: ChunkFile | None = None
        self.pinned: Final = device.type == "cuda"
        if self.pinned:
            _pin(self.lines)
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self.lines.data_ptr())

    def add_file(self, folder: Path, most_bytes: int) -> None:
        """Make a file for rows that leave the arena while their request runs.

        Without one, as on a machine that has no such folder, requests whose rows do not fit are refused by the client.

        Args:
            folder: folder of the file, which has no name.
            most_bytes: maximum bytes in the file; the client grants requests no more.
        """
        try:
            lines = min(SPARSE * most_bytes // LINE_BYTES, MOST_LINES - len(self.lines))
            self.file = ChunkFile(folder, len(self.lines), lines)
        except InvalidSetting as error:
            _LOG.warning("rows cannot move to disk, so all rows of a request must fit in memory: %s", error)

    def allocate(self, count: int) -> Ints:
        """Allocate `count` pages, or as many as are free: int64 page numbers."""
        return self.pages.allocate(count)

    def free(self, pages: Ints) -> None:
        """Free pages; once none is in use, return memory above `WARM_BYTES` to the system, unless it is pinned."""
        self.pages.free(pages)
        if self.pinned:
            return
        warm = WARM_BYTES // self.shape.page_bytes
        touched = self.pages.forget_untouched(warm)
        if self.pages.touched < touched:
            self.segment.trim(warm * self.shape.page_bytes, touched * self.shape.page_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes to reduce at a time: one page on CPU, to fit the cache; `BUS_BYTES` on CUDA, to fill the bus."""
        return BUS_BYTES if self.pinned else self.shape.page_bytes

    def read(self, first: int, records: int, lines: int) -> torch.Tensor:
        """Read `records` consecutive records of `lines` lines each to the arena's device: uint8 [records, bytes].

        Raises:
            WorkerFailure: there are no such lines, in memory or in the file.
        """
        found = self.stored(first, records * lines).view(records, lines * LINE_BYTES)
        return found.to(self.device, non_blocking=True) if self.pinned else found

    def stored(self, first: int, count: int) -> torch.Tensor:
        """Return lines of the memory, a view; or of the file, a copy: uint8 [count, LINE_BYTES].

        Raises:
            WorkerFailure: there are no such lines.
        """
        if self.file is not None and first >= self.file.first:
            return self.file.read(first, count)
        if first + count > len(self.lines):
            raise WorkerFailure(f"lines {first:,} to {first + count:,} are outside of the arena")
        return self.lines[first : first + count]

    def write(self, first: int, stored: torch.Tensor, offset: int = 0) -> None:
        """Write bytes, uint8 [bytes], starting `offset` bytes behind the start of line `first`."""
        start = first * LINE_BYTES + offset
        self.lines.view(-1)[start : start + len(stored)] = stored.to("cpu")

    def windows(self, bytes_: int, itemsize: int, offset: int = 0) -> npt.NDArray[np.generic]:
        """View overlapping windows of `bytes_` bytes, one per line, `offset` bytes behind the start of each.

        Since the windows overlap, write at most one to each line at once.

        Args:
            bytes_: bytes of a window.
            itemsize: bytes of an element; 1, 2, 4 or 8.
            offset: bytes from the start of the line; may be more than a line.

        Returns:
            Unsigned integers of that size: [lines, bytes_ / itemsize].
        """
        flat = self.lines.view(-1).numpy()
        count = max(0, (len(flat) - bytes_ - offset) // LINE_BYTES + 1)
        return np.ndarray((count, bytes_ // itemsize), f"u{itemsize}", flat, offset, strides=(LINE_BYTES, itemsize))


def line_view(segment: SharedSegment) -> torch.Tensor:
    """View the memory of a segment as lines: uint8 [lines, LINE_BYTES]."""
    flat = torch.frombuffer(segment.memory, dtype=torch.uint8, offset=HEADER_BYTES)
    return flat[: len(flat) // LINE_BYTES * LINE_BYTES].view(-1, LINE_BYTES)


def _pin(lines: torch.Tensor) -> None:
    """Pin memory, so that the device can write to it."""
    error = torch.cuda.cudart().cudaHostRegister(lines.data_ptr(), lines.nbytes, 1)  # 1: for every context
    if int(error):
        raise WorkerFailure(
            f"{lines.nbytes:,} bytes of memory for captured rows cannot be pinned (CUDA error {int(error)}); "
            "lower SteerModel(..., capture_bytes=), or raise the memory limit of this machine"
        )
