"""The arena: lines in shared memory that rows end up in, handed out in pages.

Number 6 in the life of a request. On CPU taps write into the shared memory itself: what a tap writes is where the
client reads it, and nothing is copied in between. On CUDA the memory is pinned, and each pass's rows are copied
there from the device. A request's pages hold its records in the order of its rows; every record has a label, the
position and the token id that the model read.
"""

from __future__ import annotations

import weakref
from typing import Final

import numpy as np
import torch
from jaxtyping import Float

from steercap.core.rows import Ints, PageAllocator, PageShape
from steercap.errors import WorkerFailure
from steercap.transport.shared import HEADER_BYTES, SharedSegment

#: Memory that stays resident while nothing is captured, so that short requests do not fault pages in anew.
WARM_BYTES: Final = 64 << 20
#: What is moved to a device in one piece.
BUS_BYTES: Final = 64 << 20


class Arena:
    """Lines in shared memory.

    Args:
        shape: lines of a page and bytes of a line.
        width: elements of a line.
        dtype: the model's dtype.
        capture_bytes: most the arena may take.
        device: where the model computes; on CUDA the memory is pinned, all of it, as long as the arena lives.

    Raises:
        WorkerFailure: there is not room for a page, or the memory cannot be pinned.
    """

    def __init__(
        self, shape: PageShape, width: int, dtype: torch.dtype, capture_bytes: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.width = width
        self.dtype = dtype
        self.device = device
        pages = capture_bytes // shape.page_bytes
        if not pages:
            raise WorkerFailure(f"capture_bytes={capture_bytes} holds no page of rows; {shape.page_bytes:,} at least")
        self.segment = SharedSegment.create(pages * shape.page_bytes)
        self.pages = PageAllocator(pages)
        self.lines = line_view(self.segment, width, dtype)
        #: Position + 1 and token id of the record that begins at each line; 0 and 0 where none does.
        self._labels = np.zeros((pages, shape.lines, 2), dtype=np.int32)
        self._label_of_line = self._labels.reshape(-1, 2)
        self._pinned = device.type == "cuda"
        if self._pinned:
            _pin(self.lines)
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self.lines.data_ptr())

    def allocate(self, count: int) -> Ints:
        """Pages without labels, `count` of them or as many as are free: int64."""
        pages = self.pages.allocate(count)
        self._labels[pages] = 0
        return pages

    def free(self, pages: Ints) -> None:
        """Take pages back; once nothing is in use, memory above the warm part goes back to the system, if it can."""
        self.pages.free(pages)
        if self._pinned:
            return
        warm = WARM_BYTES // self.shape.page_bytes
        touched = self.pages.forget_untouched(warm)
        if self.pages.touched < touched:
            self.segment.trim(warm * self.shape.page_bytes, touched * self.shape.page_bytes)

    def label(self, lines: Ints, positions: Ints, token_ids: Ints) -> None:
        """Say whose records begin at `lines`."""
        self._label_of_line[lines, 0] = positions + 1
        self._label_of_line[lines, 1] = token_ids

    def labels(self, lines: Ints | slice) -> Ints:
        """Positions and token ids of the records at `lines`, [2, lines]; -1 for a position that never came."""
        found: Ints = self._label_of_line[lines].astype(np.int64).T
        found[0] -= 1
        return found

    @property
    def block_lines(self) -> int:
        """Lines to reduce at a time: few enough for a CPU's cache, or enough to fill a bus."""
        return BUS_BYTES // self.shape.line_bytes if self._pinned else self.shape.lines

    def read(self, first: int, count: int) -> Float[torch.Tensor, "lines width"]:
        """Lines on the device that reduces them."""
        lines = self.lines[first : first + count]
        return lines.to(self.device, non_blocking=True) if self._pinned else lines


def line_view(segment: SharedSegment, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The lines of a segment: a tensor [lines, width] over its memory."""
    flat = torch.frombuffer(segment.memory, dtype=torch.uint8, offset=HEADER_BYTES)
    line_bytes = width * dtype.itemsize
    whole = len(flat) // line_bytes * line_bytes
    return flat[:whole].view(dtype).view(-1, width)


def _pin(lines: torch.Tensor) -> None:
    """Lock memory in place, so that the device can write to it by itself."""
    error = torch.cuda.cudart().cudaHostRegister(lines.data_ptr(), lines.nbytes, 1)  # 1: for every context
    if int(error):
        raise WorkerFailure(
            f"{lines.nbytes:,} bytes of memory for captured rows cannot be pinned (CUDA error {int(error)}); "
            "lower SteerModel(..., capture_bytes=), or raise the memory limit of this machine"
        )
