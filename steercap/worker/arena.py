"""Arena of captured rows: lines of shared memory, allocated in pages; and layouts of the records in it.

A layout has two shapes: that of the raw rows as the model computes them, which wait on the device, and that of
the rows as they are stored.

On CPU taps write into the shared memory itself, which the client reads: nothing is copied in between. On CUDA the
memory is pinned, and each pass's rows are copied there from the device. A request's pages hold
its records in the order of its rows; `core.schema` lays a record out.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.program import NONE
from steercap.core.rows import Ints, PageAllocator, PageShape
from steercap.core.schema import LINE_BYTES, RAW, Coding, PointSchema, RecordShape
from steercap.errors import InvalidSetting, WorkerFailure
from steercap.kernels.bits import weight
from steercap.kernels.codecs import record_of
from steercap.saes.encoder import Encoder
from steercap.worker.chunk_file import ChunkFile
from steercap.worker.memory import SharedSegment, line_view

#: Maximum number of record layouts in use at once; running requests rarely need more than a few.
LAYOUTS: Final = 4096

#: Pairs of a point's index and the SAE encoder that reads the point's rows before they are stored; () without SAEs.
Reads: TypeAlias = "tuple[tuple[int, Encoder], ...]"


@dataclass(frozen=True)
class Form:
    """Storage form of a request's captured rows: their encoding, and what is applied to them before it.

    Args:
        coding: encoding of the rows.
        slot: slot of the vectors that the encoding needs, such as directions; NONE if it needs none.
        before_edits: True to keep rows as they were before the edits of their point.
        reads: SAE encoders that read the rows first; a layout in use keeps them alive.
    """

    coding: Coding = RAW
    slot: int = NONE
    before_edits: bool = False
    reads: Reads = ()


@dataclass(frozen=True)
class RecordLayout:
    """Layout of a record on this rank: the captured rows of one token, point after point.

    Args:
        number: index of the layout in the tables.
        points: indices into the engine's armed points, in the order of the record.
        locals: the same points, as indices among the points of this rank.
        form: storage form of its rows.
        raw: shape of the record of raw rows, as they are computed.
        stored: shape of the record as it is stored.
    """

    number: int
    points: tuple[int, ...]
    locals: tuple[int, ...]
    form: Form
    raw: RecordShape
    stored: RecordShape


class Layouts:
    """Registry of the record layouts in use, with tables for looking up many tokens at once.

    The last row of each table stands for no layout: `table[NONE]` is 0, or NONE.

    Args:
        local: index of each point of this rank among the engine's armed points, ascending.
        schemas: schemas of these points.
        kept: True for the points whose rows this rank keeps; rows that all ranks hold whole are kept by one.
    """

    def __init__(self, local: Sequence[int], schemas: Sequence[PointSchema], kept: Sequence[bool]) -> None:
        self._local = tuple(local)
        self._kept = tuple(point for point, keeps in zip(local, kept, strict=True) if keeps)
        self._schemas = dict(zip(local, schemas, strict=True))
        size = LAYOUTS + 1
        #: Line of every local point in a raw record, NONE where it is not kept: int32 [layouts, points].
        self.offsets = np.full((size, len(self._local)), NONE, dtype=np.int32)
        #: Lines of a raw record: int64 [layouts].
        self.raw_lines = np.zeros(size, dtype=np.int64)
        #: Lines of a stored record: int64 [layouts].
        self.lines = np.zeros(size, dtype=np.int64)
        #: True where rows are stored in another form than they are computed in: bool [layouts].
        self.encoded = np.zeros(size, dtype=np.bool_)
        #: True where rows are kept as they were before the edits of their point: bool [layouts].
        self.before = np.zeros(size, dtype=np.bool_)
        #: Expected checksum of one token's copies, if all of them are made: int64 [layouts].
        self.checksums = np.zeros(size, dtype=np.int64)
        #: Numbers of layouts written to `offsets` since the taps last read them.
        self.fresh: dict[int, None] = {}
        self._known: dict[tuple[tuple[int, ...], Form], RecordLayout] = {}
        self._used: dict[int, RecordLayout] = {}
        self._users: dict[int, int] = {}
        self._free = list(range(LAYOUTS - 1, -1, -1))

    def __getitem__(self, number: int) -> RecordLayout:
        """Return the layout in use with this number."""
        return self._used[number]

    def points(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Return the wanted points (indices among the engine's armed points) that this rank keeps, in record order."""
        if tuple(wanted) == self._kept:
            return self._kept
        known = set(wanted)
        return tuple(index for index in self._kept if index in known)

    def schemas(self, points: Sequence[int]) -> list[PointSchema]:
        """Return the schemas of points of this rank (indices among the engine's armed points), in the given order."""
        return [self._schemas[point] for point in points]

    def acquire(self, wanted: Sequence[int], form: Form) -> RecordLayout | None:
        """Return the layout of records of points in a form, and count one more user; None if `LAYOUTS` are in use."""
        key = self.points(wanted), form
        if key not in self._known:
            if not self._free:
                return None
            self._known[key] = self._write(self._free[-1], *key)
            self._free.pop()  # only now: a failed write must not use up a number
        layout = self._known[key]
        self._users[layout.number] = self._users.get(layout.number, 0) + 1
        return layout

    def release(self, layout: RecordLayout) -> None:
        """Remove one user of a layout; drop the layout with its last user."""
        self._users[layout.number] -= 1
        if not self._users[layout.number]:
            del self._users[layout.number], self._used[layout.number]
            del self._known[layout.points, layout.form]
            self._free.append(layout.number)

    def _write(self, number: int, points: tuple[int, ...], form: Form) -> RecordLayout:
        schemas = self.schemas(points)
        raw = record_of(schemas)
        stored = record_of(schemas, form.coding)
        lines = {point: offset // LINE_BYTES for point, offset in zip(points, raw.offsets, strict=True)}
        self.offsets[number] = [lines.get(point, NONE) for point in self._local]
        self.raw_lines[number], self.lines[number] = raw.lines, stored.lines
        self.before[number], self.encoded[number] = form.before_edits, form.coding != RAW
        locals_ = tuple(local for local, point in enumerate(self._local) if point in lines)
        self.checksums[number] = sum(map(weight, locals_))
        self.fresh[number] = None
        layout = self._used[number] = RecordLayout(number, points, locals_, form, raw, stored)
        return layout


_LOG: Final = logging.getLogger(__name__)
#: Line numbers of the file of rows that left memory, per line that it may hold. The file is sparse and a request's rows
#: are consecutive: with spare numbers, freed regions that are too small for the next request do no harm.
SPARSE: Final = 16
#: Bytes of the arena that stay resident while nothing is captured, so that short requests cause no page faults.
WARM_BYTES: Final = 64 << 20
#: Block size, in bytes, of reads that are copied to a CUDA device.
BUS_BYTES: Final = 64 << 20


class Arena:
    """Arena of captured rows: lines in shared memory, allocated in pages.

    Args:
        shape: shape of a page of the arena, in lines.
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
        """Create the file for rows that leave the arena while their request runs.

        If the folder cannot hold one, a warning is logged, and the client refuses requests whose rows do not fit.

        Args:
            folder: folder of the file, which has no name.
            most_bytes: maximum bytes in the file; the client grants requests no more.
        """
        try:
            self.file = ChunkFile(folder, len(self.lines), SPARSE * most_bytes // LINE_BYTES)
        except InvalidSetting as error:
            _LOG.warning("rows cannot move to disk, so all rows of a request must fit in memory: %s", error)

    def allocate(self, count: int) -> Ints:
        """Allocate `count` pages, or all free ones if there are fewer; return their numbers, int64 [pages]."""
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
        """Maximum bytes to reduce at once: one page on CPU, to fit the cache; `BUS_BYTES` on CUDA, to fill the bus."""
        return BUS_BYTES if self.pinned else self.shape.page_bytes

    def read(self, first: int, records: int, lines: int) -> torch.Tensor:
        """Read `records` consecutive records of `lines` lines, from line `first` on, to the arena's device.

        Returns:
            uint8 [records, lines * LINE_BYTES]; on CPU it may be a view.

        Raises:
            WorkerFailure: there are no such lines, in memory or in the file.
        """
        found = self.stored(first, records * lines).view(records, lines * LINE_BYTES)
        return found.to(self.device, non_blocking=True) if self.pinned else found

    def stored(self, first: int, count: int) -> torch.Tensor:
        """Return `count` lines on the host, a view of memory or a copy from the file: uint8 [count, LINE_BYTES].

        Raises:
            WorkerFailure: there are no such lines.
        """
        if self.file is not None and first >= self.file.first:
            return self.file.read(first, count)
        if first + count > len(self.lines):
            raise WorkerFailure(f"lines {first:,} to {first + count:,} are outside of the arena")
        return self.lines[first : first + count]

    def write(self, first: int, stored: torch.Tensor, offset: int = 0) -> None:
        """Write bytes, uint8 [bytes] on any device, to memory, `offset` bytes behind the start of line `first`."""
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


def _pin(lines: torch.Tensor) -> None:
    """Pin host memory, so that the CUDA device can write to it; raise WorkerFailure if CUDA refuses."""
    error = torch.cuda.cudart().cudaHostRegister(lines.data_ptr(), lines.nbytes, 1)  # 1: for every context
    if int(error):
        raise WorkerFailure(
            f"{lines.nbytes:,} bytes of memory for captured rows cannot be pinned (CUDA error {int(error)}); "
            "lower SteerModel(..., capture_bytes=), or raise the memory limit of this machine"
        )
