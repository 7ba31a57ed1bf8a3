"""Reductions over a request's rows, in the worker and in float32, so that one row travels instead of a thousand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float

from steercap.core.messages import LineRange
from steercap.core.spec import Reduction

if TYPE_CHECKING:
    from steercap.worker.arena import Arena

#: Reduced rows are float32, whatever the model's dtype.
REDUCED_DTYPE: Final = torch.float32


class Accumulator:
    """A running reduction over rows that arrive in blocks, in order.

    Args:
        reduce: which reduction.
        value: what rows before came to, their sum for a mean; None if there were none.
        rows: how many they were.
    """

    def __init__(
        self, reduce: Reduction, value: Float[torch.Tensor, "points width"] | None = None, rows: int = 0
    ) -> None:
        self._reduce = reduce
        self._rows = rows
        self._value = value

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


def reduce_rows(arena: Arena, ranges: Sequence[LineRange], record_lines: int, reduce: Reduction) -> None:
    """Reduce records, on the device that the model computes on, and write the result, float32, over the first of them.

    Args:
        arena: where the records are.
        ranges: the lines of all of them, in order; one record at least.
        record_lines: lines of a record, one a point.
        reduce: which reduction.
    """
    accumulator = Accumulator(reduce)
    most = max(1, arena.block_lines // record_lines) * record_lines
    for lines in ranges:
        for start in range(lines.start, lines.start + lines.count, most):
            block = arena.read(start, min(most, lines.start + lines.count - start))
            accumulator.add(block.view(-1, record_lines, arena.width))
    reduced = accumulator.result().contiguous().view(arena.dtype).view(-1, arena.width)
    first = ranges[0].start
    arena.lines[first : first + len(reduced)] = reduced
