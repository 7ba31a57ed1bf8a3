"""Buffer that shuffles rows: each draw takes a random subset of its rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class ShuffleBuffer:
    """Buffer of rows in named columns, with a fixed capacity.

    Args:
        capacity: maximum number of rows.
        seed: seed of the draws.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self._generator = torch.Generator().manual_seed(seed)
        self._columns: dict[str, torch.Tensor] = {}
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    @property
    def full(self) -> bool:
        """True if the buffer is at capacity."""
        return self._filled == self.capacity

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """Columns of the rows in the buffer, [rows, ...] each; views that a draw overwrites."""
        return {name: column[: self._filled] for name, column in self._columns.items()}

    def add(self, columns: Mapping[str, torch.Tensor]) -> int:
        """Add as many leading rows as there is room for, and return their number.

        Args:
            columns: columns by name, [rows, ...]; the same names in each call.
        """
        taken = min(self.capacity - self._filled, len(next(iter(columns.values()))))
        for name, column in columns.items():
            if name not in self._columns:
                self._columns[name] = torch.empty((self.capacity, *column.shape[1:]), dtype=column.dtype)
            self._columns[name][self._filled : self._filled + taken] = column[:taken]
        self._filled += taken
        return taken

    def draw(self, rows: int) -> dict[str, torch.Tensor]:
        """Remove and return `rows` random rows in a random order, or all rows if there are fewer."""
        rows = min(rows, self._filled)
        order = torch.randperm(self._filled, generator=self._generator)[:rows]
        drawn = {name: column.index_select(0, order) for name, column in self._columns.items()}
        kept = self._filled - rows
        holes = order[order < kept]
        is_drawn = torch.zeros(rows, dtype=torch.bool)
        is_drawn[order[order >= kept] - kept] = True
        moved = torch.arange(kept, self._filled)[~is_drawn]  # the last rows that stay go where rows are missing
        for column in self._columns.values():
            column[holes] = column[moved]
        self._filled = kept
        return drawn
