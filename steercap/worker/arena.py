"""The arena: lines that taps write rows into, handed out in pages.

Number 6 in the life of a request. On CPU the arena is the shared memory itself: what a tap writes is where the
client reads it, and nothing is copied in between. A request's pages hold its records in the order of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from steercap.core.rows import PageAllocator, PageShape
from steercap.transport.shared import HEADER_BYTES, SharedSegment

#: Memory that stays resident while nothing is captured, so that short requests do not fault pages in anew.
WARM_BYTES: Final = 64 << 20


class Arena:
    """Lines in shared memory.

    Args:
        shape: lines of a page and bytes of a line.
        width: elements of a line.
        dtype: the model's dtype.
        capture_bytes: most the arena may take.
    """

    def __init__(self, shape: PageShape, width: int, dtype: torch.dtype, capture_bytes: int) -> None:
        self.shape = shape
        self.width = width
        self.dtype = dtype
        pages = capture_bytes // shape.page_bytes
        self.segment = SharedSegment.create(pages * shape.page_bytes)
        self.pages = PageAllocator(pages)
        self.lines = line_view(self.segment, width, dtype)

    def page_line(self, page: int) -> int:
        """First line of a page."""
        return page * self.shape.lines

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back; once nothing is in use, memory above the warm part goes back to the system."""
        self.pages.free(pages)
        warm = WARM_BYTES // self.shape.page_bytes
        touched = self.pages.forget_untouched(warm)
        if self.pages.touched < touched:
            self.segment.trim(warm * self.shape.page_bytes, touched * self.shape.page_bytes)


def line_view(segment: SharedSegment, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The lines of a segment: a tensor [lines, width] over its memory."""
    flat = torch.frombuffer(segment.memory, dtype=torch.uint8, offset=HEADER_BYTES)
    line_bytes = width * dtype.itemsize
    whole = len(flat) // line_bytes * line_bytes
    return flat[:whole].view(dtype).view(-1, width)
