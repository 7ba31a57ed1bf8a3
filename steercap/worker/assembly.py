"""Assembly of the records in an arena into one tensor per point.

Shape legend: record = the encoded rows of one token, point after point; run = consecutive records, [records, bytes].

Rows are copied by strides, run by run, and any points and rows of the result can be filled by themselves, on any
thread. Records lie in one run, but for an arena that was crowded. Fresh memory costs as much as the copy if it comes
4 KiB at a time; NumPy asks for huge pages (`MADV_HUGEPAGE`) from 4 MiB on, which torch does not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.messages import CapturedRows
from steercap.core.schema import LINE_BYTES, PointSchema
from steercap.errors import CaptureIncomplete
from steercap.kernels.codecs import ENCODINGS, Codec, packed, record_of
from steercap.kernels.codecs.coded import CodedRows
from steercap.worker.memory import Readable

#: Bytes copied in one call: about a millisecond of a core, and whole huge pages of the result.
PART_BYTES: Final = 4 << 20
#: Rows of fewer bytes are copied as whole records, and split afterwards.
SMALL_BYTES: Final = 512
#: Number of runs from which on a call copies all points of a few runs, not a few points of all.
MANY_RUNS: Final = 16


class RowBlock(NamedTuple):
    """Rows of consecutive points with one schema, or whole records as the rows of one point.

    Args:
        schemas: schemas of the points; of all points, if `rows` are records.
        offset: offset of the first point's row in a record, in bytes.
        padded: distance from a point's row to the next point's, in bytes.
        rows: memory of the rows, uint8 [points, rows, row bytes].
    """

    schemas: Sequence[PointSchema]
    offset: int
    padded: int
    rows: npt.NDArray[np.uint8]


class RowPart(NamedTuple):
    """Points and rows of a block that are copied in one call."""

    block: RowBlock
    points: slice
    rows: slice


class Assembly:
    """Tensors of one worker's captured rows while they are copied, part by part in any order and on any thread.

    Args:
        captured_rows: the worker's message that describes the rows.
        schemas: schemas of the message's points.
        source: the lines that hold the rows.
        shard: index of the worker among those that hold shards of the same rows.

    Attributes:
        parts: parts that together cover the rows, about `PART_BYTES` each; arguments of `fill`.

    Raises:
        CaptureIncomplete: the message's lines are outside `source`, or their number does not match its records.
    """

    def __init__(
        self, captured_rows: CapturedRows, schemas: Sequence[PointSchema], source: Readable, shard: int = 0
    ) -> None:
        self._captured_rows, self._shard = captured_rows, shard
        self._encoding = ENCODINGS[captured_rows.coding.encoding]
        self._shape = self._encoding.record(schemas, captured_rows.coding)
        self._whole = self._encoding.align < LINE_BYTES or min(self._shape.sizes, default=0) < SMALL_BYTES
        self._runs = _runs(captured_rows, self._shape.lines, source)
        self._blocks = list(self._allocated(schemas))
        self._firsts = [first for first, _ in self._runs]
        self.parts = [part for block in self._blocks for part in _parts(block, scattered=len(self._runs) >= MANY_RUNS)]

    def _allocated(self, schemas: Sequence[PointSchema]) -> Iterator[RowBlock]:
        """Allocate memory for the rows, in one piece."""
        rows, record = self._captured_rows.stored_rows, self._shape.lines * LINE_BYTES
        if self._whole:
            yield RowBlock(schemas, 0, record, np.empty((1, rows, record), dtype=np.uint8))
            return
        most = rows * sum(self._shape.sizes) + LINE_BYTES * len(schemas)  # each block begins at a line
        memory, used, first = np.empty(most, dtype=np.uint8), 0, 0
        for _, group in groupby(schemas):
            alike = list(group)
            size, offset = self._shape.sizes[first], self._shape.offsets[first]
            stop, padded = used + len(alike) * rows * size, -(-size // LINE_BYTES) * LINE_BYTES
            yield RowBlock(alike, offset, padded, memory[used:stop].reshape(len(alike), rows, size))
            used, first = -(-stop // LINE_BYTES) * LINE_BYTES, first + len(alike)

    def fill(self, part: RowPart) -> None:
        """Copy one of `parts`; releases the GIL."""
        block, points, rows = part
        start, stop = (block.offset + point * block.padded for point in (points.start, points.stop))
        runs = slice(bisect_right(self._firsts, rows.start) - 1, bisect_left(self._firsts, rows.stop))
        for first, run in self._runs[runs]:
            begin, end = max(first, rows.start), min(first + len(run), rows.stop)
            stored = run[begin - first : end - first, start:stop].reshape(end - begin, -1, block.padded)
            block.rows[points, begin:end] = stored[:, :, : block.rows.shape[2]].swapaxes(0, 1)

    def rows(self) -> list[torch.Tensor | CodedRows]:
        """Return each point's rows, once all parts are filled: [rows, *shard shape] each, in memory of their own.

        Projected rows are [rows, directions]; rows in a lossy codec are returned as their codes.
        """
        if self._whole:
            (block,) = self._blocks
            records, spans = _tensor(block), zip(self._shape.offsets, self._shape.sizes, strict=True)
            alone = zip(block.schemas, spans, strict=True)
            parts = (self._in_client_form(records[:, at : at + size], schema, 1) for schema, (at, size) in alone)
        else:
            parts = (
                self._in_client_form(_tensor(block), block.schemas[0], len(block.schemas)) for block in self._blocks
            )
        return [rows for part in parts for rows in part]

    def _in_client_form(self, stored: torch.Tensor, schema: PointSchema, count: int) -> list[torch.Tensor | CodedRows]:
        """Convert stored rows of `count` points with equal schemas, uint8 [count * rows, row bytes], for the client.

        Returns one item per point: a tensor, [rows, *shard shape] or [rows, directions], or `CodedRows` for a lossy
        codec. All are copied at once, so that threads that gather hold the GIL only briefly.
        """
        coding, rows = self._captured_rows.coding, self._captured_rows.stored_rows
        if isinstance(self._encoding, Codec):
            shard = self._shard if schema.shards > 1 else None
            whole = CodedRows(coding, schema, self._encoding.parts(stored, schema, coding), shard)
            return [whole[at * rows : (at + 1) * rows] for at in range(count)]
        decoded = self._encoding.decode(stored if stored.is_contiguous() else packed(stored), schema, coding)
        return [decoded[at * rows : (at + 1) * rows] for at in range(count)]


def stored_bytes(captured_rows: CapturedRows, schemas: Sequence[PointSchema]) -> int:
    """Return the size in bytes of captured rows in their stored encoding, without the padding to whole lines."""
    return captured_rows.stored_rows * sum(record_of(schemas, captured_rows.coding).sizes)


def _tensor(block: RowBlock) -> torch.Tensor:
    """View a block as stored rows, point after point: uint8 [points * rows, row bytes]."""
    flat = torch.from_numpy(block.rows.reshape(-1))  # before its shape: NumPy's empty arrays have no strides
    points, rows, size = block.rows.shape
    return flat.view(points * rows, size)


def _parts(block: RowBlock, *, scattered: bool) -> Iterator[RowPart]:
    """Split a block into parts of about `PART_BYTES`: by points, or by rows if these are `scattered`."""
    points, rows, size = block.rows.shape
    if block.rows.size:
        most_points = points if scattered else max(1, PART_BYTES // (rows * size))
        most_rows = max(1, PART_BYTES // (most_points * size))
        for point, row in product(range(0, points, most_points), range(0, rows, most_rows)):
            own = slice(point, min(point + most_points, points)), slice(row, min(row + most_rows, rows))
            yield RowPart(block, *own)


def _runs(captured_rows: CapturedRows, record: int, source: Readable) -> list[tuple[int, npt.NDArray[np.uint8]]]:
    """Find runs of records in `source`; raise CaptureIncomplete if its lines do not match the rows.

    Args:
        captured_rows: the worker's message that describes the rows.
        record: lines of a record.
        source: the lines that hold the rows.

    Returns:
        For each range of lines the number of its first row, and its records: uint8 [records, record bytes].
    """
    name, rows, lines = captured_rows.owner.key, captured_rows.stored_rows, sum(item.count for item in source.ranges)
    if lines != rows * record or (record and any(item.count % record for item in source.ranges)):
        raise CaptureIncomplete(
            f"{name}: {rows} records of {len(captured_rows.points)} points, {record} lines each, expected; the worker "
            f"names {lines} lines"
        )
    if any(item.start < 0 or item.start + item.count > len(source.lines) for item in source.ranges):
        raise CaptureIncomplete(f"{name}: the worker names lines outside of its arena")
    found, first, memory = [], 0, source.lines.numpy()
    for item in filter(attrgetter("count"), source.ranges):
        run = memory[item.start : item.start + item.count].reshape(-1, record * LINE_BYTES)
        found.append((first, run))
        first += len(run)
    return found
