"""The tables that tell every tap of a forward pass which rows go where, and which are changed first.

Number 5 in the life of a request. They are filled once a step, before the forward pass, and emptied after it;
a tap that finds them empty returns at once. On CPU they are host tensors, sized by the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float

from steercap.core.rows import Ints
from steercap.kernels.reference import copy_row, copy_rows
from steercap.worker.edits import EditTables, StepEdits

ABSENT: Final = -1


@dataclass(frozen=True)
class StepRows:
    """What one request keeps of one pass.

    Args:
        tokens: places in the batch of the tokens kept, int64 [captured].
        lines: first line of each token's record, int64 [captured].
        offsets: line of each local point in the record, ABSENT where it is not wanted: int64 [points].
        before_edits: whether rows are kept as they were before the edits of their point.
    """

    tokens: Ints
    lines: Ints
    offsets: Ints
    before_edits: bool = False


class CopyTable:
    """The rows that a pass copies: a place in the batch, and a line for each point.

    Args:
        num_points: points armed in this process.
    """

    def __init__(self, num_points: int) -> None:
        self._tokens = self._lines = torch.empty(0, dtype=torch.int64)
        self._offsets = torch.empty((num_points, 0), dtype=torch.int64)
        self._complete: list[bool] = []

    def fill(self, steps: Sequence[StepRows]) -> None:
        """Take in what the requests of a pass keep."""
        if not steps:
            self._tokens = self._tokens[:0]
            return
        self._tokens = torch.from_numpy(np.concatenate([step.tokens for step in steps]))
        self._lines = torch.from_numpy(np.concatenate([step.lines for step in steps]))
        self._offsets, self._complete = _offsets(steps, len(self._tokens))

    def copy(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
        arena: Float[torch.Tensor, "lines width"],
    ) -> None:
        """Copy the rows wanted at one point to their lines."""
        if not len(self._tokens):
            return
        tokens, lines = self._wanted(point)
        if len(tokens) == 1:
            copy_row(hidden, residual, int(tokens), arena[int(lines)])
        elif len(tokens):
            copy_rows(hidden, residual, tokens, lines, arena)

    def _wanted(self, point: int) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = self._offsets[point]
        if self._complete[point]:
            return self._tokens, self._lines + offsets
        wanted = torch.nonzero(offsets >= 0).flatten()
        return self._tokens[wanted], (self._lines + offsets)[wanted]


class StepTables:
    """Tables of the step that runs, and the taps' end of them.

    Args:
        num_points: points armed in this process.
        width: elements of a row.
    """

    def __init__(self, num_points: int, width: int) -> None:
        self.width = width
        self.fired: Ints = np.zeros(num_points, dtype=np.int64)
        self.misfit: str | None = None
        self._before = CopyTable(num_points)
        self._after = CopyTable(num_points)
        self._arena: torch.Tensor | None = None
        self._edits: EditTables | None = None
        self.open = False
        self._num_tokens = 0

    def use(self, arena: Float[torch.Tensor, "lines width"] | None, edits: EditTables) -> None:
        """Write rows into `arena`, if this rank keeps any, and edit them by `edits`, from now on."""
        self._arena = arena
        self._edits = edits

    def fill(self, copies: Sequence[StepRows], edits: Sequence[StepEdits], num_tokens: int) -> None:
        """Open the tables for a pass over `num_tokens` tokens (padding not counted)."""
        self.fired[:] = 0
        self.misfit = None
        self._num_tokens = num_tokens
        self._before.fill([step for step in copies if step.before_edits])
        self._after.fill([step for step in copies if not step.before_edits])
        if self._edits is not None and edits:
            self._edits.open(edits)
        self.open = True

    def clear(self) -> Ints:
        """Close the tables: every tap is idle until the next fill.

        Returns:
            Whether each token that was to be edited was: bool [steered], in the order of `fill`.
        """
        self.open = False
        return np.zeros(0, dtype=np.bool_) if self._edits is None else self._edits.close()

    def on_tap(
        self, hidden: Float[torch.Tensor, "n width"], residual: Float[torch.Tensor, "n width"] | None, point: int
    ) -> None:
        """Copy and edit the rows wanted at `point`; called by the operator, once a point and pass."""
        if not self.open:
            return
        self.fired[point] += 1
        if len(hidden) < self._num_tokens or hidden.shape[-1] != self.width:
            self.misfit = f"tap {point} saw {tuple(hidden.shape)} for {self._num_tokens} tokens"
            return
        if self._arena is not None:
            self._before.copy(hidden, residual, point, self._arena)
        if self._edits is not None and self._edits.edits(point):
            self._edits.apply(hidden, residual, point)
        if self._arena is not None:
            self._after.copy(hidden, residual, point, self._arena)


def _offsets(steps: Sequence[StepRows], captured: int) -> tuple[torch.Tensor, list[bool]]:
    """Line offset of every point and token [points, captured], and which points all tokens want."""
    first = steps[0].offsets
    if all(step.offsets is first for step in steps):
        offsets = torch.from_numpy(first)[:, None].expand(-1, captured)
        return offsets, (first != ABSENT).tolist()
    table = np.repeat(np.stack([step.offsets for step in steps], 1), [len(step.tokens) for step in steps], axis=1)
    return torch.from_numpy(table), (table != ABSENT).all(axis=1).tolist()
