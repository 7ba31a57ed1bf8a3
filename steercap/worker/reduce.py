"""Reductions over a request's rows, in the worker and in float32, so that one row travels instead of a thousand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float

from steercap.core.rows import Ints
from steercap.core.spec import Reduction

if TYPE_CHECKING:
    from steercap.worker.arena import Arena

#: Reduced rows are float32, whatever the model's dtype.
REDUCED_DTYPE: Final = torch.float32


class Accumulator:
    """A running reduction over rows that arrive in blocks, in order.

    Args:
        reduce: which reduction.
    """

    def __init__(self, reduce: Reduction) -> None:
        self._reduce = reduce
        self._rows = 0
        self._value: torch.Tensor | None = None

    def add(self, block: Float[torch.Tensor, "rows points width"]) -> None:
        """Take in the next rows, at least one."""
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

    def result(self) -> Float[torch.Tensor, "points width"]:
        """The reduced rows, float32."""
        assert self._value is not None, "nothing was added"
        return self._value / self._rows if self._reduce == "mean" else self._value


def reduce_rows(arena: Arena, first_lines: Ints, record_lines: int, rows: int, reduce: Reduction) -> None:
    """Reduce `rows` records and write the result, float32, over the first page.

    Args:
        arena: where the records are.
        first_lines: first line of each page, int64 [pages].
        record_lines: lines of a record, one a point.
        rows: records, at least one.
        reduce: which reduction.
    """
    per_page = arena.shape.records(record_lines)
    accumulator = Accumulator(reduce)
    for page, first in enumerate(first_lines.tolist()):
        count = min(per_page, rows - page * per_page)
        if count <= 0:
            break
        accumulator.add(arena.read(first, count * record_lines).view(count, record_lines, arena.width))
    reduced = accumulator.result().contiguous().view(arena.dtype).view(-1, arena.width)
    first = int(first_lines[0])
    arena.lines[first : first + len(reduced)] = reduced
