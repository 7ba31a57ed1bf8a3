"""Reductions of a request's captured rows to one row in the worker, in float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float

from steercap.core.messages import LineRange
from steercap.core.schema import LINE_BYTES, RAW, REDUCED, PointSchema
from steercap.core.spec import Reduction
from steercap.kernels.codecs import ENCODINGS
from steercap.worker.arena import RecordLayout

if TYPE_CHECKING:
    from steercap.worker.arena import Arena

#: Reduced rows are float32, whatever the model's dtype.
REDUCED_DTYPE: Final = torch.float32


class Accumulator:
    """Running reduction (sum, mean, max or last) of rows that arrive in blocks, in order.

    Args:
        reduce: the kind of reduction.
        value: reduction of earlier rows (for a mean, their sum); None if there were none.
        rows: number of earlier rows.
    """

    def __init__(self, reduce: Reduction, value: Float[torch.Tensor, ...] | None = None, rows: int = 0) -> None:
        self._reduce = reduce
        self._rows = rows
        self._value = value

    def add(self, block: Float[torch.Tensor, "rows ..."]) -> None:
        """Add the next block of rows, at least one row."""
        self._rows += len(block)
        match self._reduce:
            case "last":
                self._value = block[-1].to(REDUCED_DTYPE)
            case "max":
                best = block.amax(0).to(REDUCED_DTYPE)
                self._value = best if self._value is None else torch.maximum(self._value, best)
            case "mean" | "sum":
                part = block.sum(0, dtype=REDUCED_DTYPE)
                self._value = part if self._value is None else self._value + part

    def result(self) -> Float[torch.Tensor, ...]:
        """Return the reduction of all blocks; at least one must have been added.

        Returns:
            One row, float32 of a block's shape without its first axis.
        """
        assert self._value is not None, "nothing was added"
        return self._value / self._rows if self._reduce == "mean" else self._value


def reduce_rows(
    arena: Arena, ranges: Sequence[LineRange], layout: RecordLayout, schemas: Sequence[PointSchema], reduce: Reduction
) -> None:
    """Reduce records, point by point, on the model's device; write the result, float32, over the first record.

    Args:
        arena: arena of the records.
        ranges: lines of the records, in order; one record at least.
        layout: layout of a record, raw.
        schemas: schemas of the layout's points.
        reduce: the kind of reduction.
    """
    accumulators = [Accumulator(reduce) for _ in schemas]
    for records in record_blocks(arena, ranges, layout.raw.lines):
        for accumulator, rows in zip(accumulators, rows_of(records, layout, schemas), strict=True):
            accumulator.add(rows)
    write_reduced(arena, ranges[0].start, schemas, [accumulator.result() for accumulator in accumulators])


def record_blocks(arena: Arena, ranges: Iterable[LineRange], record: int) -> Iterator[torch.Tensor]:
    """Yield records of `record` lines in order, in blocks of about `Arena.block_bytes`: uint8 [records, bytes] each."""
    most = max(1, arena.block_bytes // (record * LINE_BYTES))
    for lines in ranges:
        for start in range(0, lines.count // record, most):
            yield arena.read(lines.start + start * record, min(most, lines.count // record - start), record)


def rows_of(records: torch.Tensor, layout: RecordLayout, schemas: Sequence[PointSchema]) -> Iterator[torch.Tensor]:
    """Yield each point's rows from raw records, uint8 [records, bytes]: [records, shard width] in the point's dtype."""
    for schema, offset, size in zip(schemas, layout.raw.offsets, layout.raw.sizes, strict=True):
        stored = records[:, offset : offset + size]
        yield ENCODINGS["raw"].decode(stored.contiguous(), schema, RAW).flatten(1)


def write_reduced(arena: Arena, line: int, schemas: Sequence[PointSchema], rows: Sequence[torch.Tensor]) -> None:
    """Write one row per point, [shard width], as float32 at a line, in the layout of `kernels.codecs.floats`.

    All are written, or none.
    """
    encoding = ENCODINGS["reduced"]
    offsets = encoding.record(schemas, REDUCED).offsets
    # They may be written over the rows that they were computed from: nothing that can fail comes in between.
    stored = [
        encoding.encode(row[None], schema, REDUCED, None)[0].to("cpu")
        for schema, row in zip(schemas, rows, strict=True)
    ]
    for offset, row in zip(offsets, stored, strict=True):
        arena.write(line, row, offset)
