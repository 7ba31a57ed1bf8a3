"""Assembly of the records in an arena into one tensor per point.

Shape legend: record = the encoded rows of one token, point after point; piece = the unit of copying, the greatest
number of bytes that divides every offset and size involved.

Rows are gathered by piece numbers, in the result's order: one call copies any number of pages, so a page costs a few
nanoseconds of index, and any slice of the result can be filled by itself, on any thread. Fresh memory costs as much as
the copy if it comes 4 KiB at a time; NumPy asks for huge pages (`MADV_HUGEPAGE`) from 4 MiB on, which torch does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import gcd
from typing import Final

import numpy as np
import torch

from steercap.core.messages import CapturedRows, LineRange
from steercap.core.rows import Ints
from steercap.core.schema import LINE_BYTES, PointSchema
from steercap.errors import CaptureIncomplete
from steercap.kernels.codecs import ENCODINGS, Codec, packed, record_of
from steercap.kernels.codecs.coded import CodedRows
from steercap.worker.memory import Readable

#: Bytes gathered in one call: a millisecond or two of a core, and whole huge pages of the result.
PART_BYTES: Final = 8 << 20
#: Rows of fewer bytes are gathered as whole records, and split afterwards.
SMALL_BYTES: Final = 512


class Assembly:
    """Tensors of one worker's captured rows while they are gathered, part by part in any order and on any thread.

    Args:
        captured_rows: the worker's message that describes the rows.
        schemas: schemas of the message's points.
        source: the lines that hold the rows.
        shard: index of the worker among those that hold shards of the same rows.

    Raises:
        CaptureIncomplete: the message's lines are outside `source`, or their number does not match its records.
    """

    def __init__(
        self, captured_rows: CapturedRows, schemas: Sequence[PointSchema], source: Readable, shard: int = 0
    ) -> None:
        self._captured_rows, self._shard = captured_rows, shard
        self._schemas = tuple(schemas)
        self._encoding = ENCODINGS[captured_rows.coding.encoding]
        self._shape = self._encoding.record(self._schemas, captured_rows.coding)
        # Whole lines are gathered, so that pieces are never small; the encoding has them to itself.
        self._padded = tuple(-(-size // LINE_BYTES) * LINE_BYTES for size in self._shape.sizes)
        self._whole = self._encoding.align < LINE_BYTES or min(self._shape.sizes, default=0) < SMALL_BYTES
        records = _records(captured_rows, self._shape.lines, source)
        self._piece, self._indices = self._pieces(records)
        flat = source.lines.numpy().reshape(-1)
        self._source = flat[: len(flat) // self._piece * self._piece].reshape(-1, self._piece)
        self._result = np.empty((len(self._indices), self._piece), dtype=np.uint8)

    def _pieces(self, records: Ints) -> tuple[int, Ints]:
        """Return the size of a piece in bytes, and the source index of each piece of the result: int64 [pieces]."""
        starts = records * LINE_BYTES
        if self._whole:
            stretches = [(0, self._shape.lines * LINE_BYTES)]
        else:
            stretches = list(zip(self._shape.offsets, self._padded, strict=True))
        numbers = [number for stretch in stretches for number in stretch]
        piece = gcd(int(np.gcd.reduce(starts)) if len(starts) else 0, *numbers) or LINE_BYTES
        taken = [
            ((starts + offset) // piece)[:, None] + np.arange(size // piece)
            for offset, size in stretches
            if len(starts)
        ]
        nothing: Ints = np.empty(0, dtype=np.int64)
        return piece, np.concatenate([part.reshape(-1) for part in taken]) if taken else nothing

    @property
    def parts(self) -> list[slice]:
        """Slices of the result's pieces that together cover it, about `PART_BYTES` each; arguments of `fill`."""
        pieces = max(1, PART_BYTES // self._piece)
        return [slice(first, first + pieces) for first in range(0, len(self._result), pieces)]

    def fill(self, part: slice) -> None:
        """Copy the pieces of one slice from `parts` into the result; releases the GIL."""
        # `clip`, since indices are checked, and `raise` would go through a buffer.
        np.take(self._source, self._indices[part], axis=0, out=self._result[part], mode="clip")

    def rows(self) -> list[torch.Tensor | CodedRows]:
        """Return each point's rows, once all parts are filled: [rows, *shard shape] each, in memory of their own.

        Projected rows are [rows, directions]; rows in a lossy codec are returned as their codes.
        """
        rows, flat = self._captured_rows.stored_rows, torch.from_numpy(self._result).view(-1)
        if self._whole:
            records = flat.view(rows, -1) if rows else flat.view(0, self._shape.lines * LINE_BYTES)
            spans = zip(self._shape.offsets, self._shape.sizes, strict=True)
            each = zip(self._schemas, spans, strict=True)
            parts = (self._in_client_form(records[:, at : at + size], schema, 1) for schema, (at, size) in each)
            return [kept for part in parts for kept in part]
        found, first = [], 0
        for (schema, size, padded), group in groupby(zip(self._schemas, self._shape.sizes, self._padded, strict=True)):
            count = len(list(group))
            stored = flat[first : first + count * rows * padded].view(count * rows, padded)[:, :size]
            found += self._in_client_form(stored, schema, count)
            first += count * rows * padded
        return found

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


def _records(captured_rows: CapturedRows, record: int, source: Readable) -> Ints:
    """Return each record's first line in `source`, int64 [rows]; raise CaptureIncomplete if lines do not match rows."""
    starts, counts = _arrays(source.ranges)
    rows, lines = captured_rows.stored_rows, int(counts.sum())
    if lines != rows * record or (record and (counts % record).any()):
        raise CaptureIncomplete(
            f"{captured_rows.owner.key}: {rows} records of {len(captured_rows.points)} points, {record} lines each, "
            f"expected; the worker names {lines} lines"
        )
    if (starts < 0).any() or (starts + counts > len(source.lines)).any():
        raise CaptureIncomplete(f"{captured_rows.owner.key}: the worker names lines outside of its arena")
    if not lines:
        return np.empty(0, dtype=np.int64)
    # Lines of all ranges one after the other: a range's start, less what came before it, plus the line's own number.
    shifts: Ints = np.repeat(starts - (np.cumsum(counts) - counts), counts // record)
    return shifts + np.arange(0, lines, record)


def _arrays(ranges: Sequence[LineRange]) -> tuple[Ints, Ints]:
    starts = np.fromiter((item.start for item in ranges), dtype=np.int64, count=len(ranges))
    return starts, np.fromiter((item.count for item in ranges), dtype=np.int64, count=len(ranges))
