"""A buffer that rows pass through to be shuffled: what is drawn is a random part of all that is in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class ShuffleBuffer:
    """Rows of a few columns, up to a number that does not change.

    Args:
        capacity: rows.
        seed: of what is drawn.
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
        """Whether no more rows go in."""
        return self._filled == self.capacity

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """What is in it, [rows, ...] each; they change when something is drawn."""
        return {name: column[: self._filled] for name, column in self._columns.items()}

    def add(self, columns: Mapping[str, torch.Tensor]) -> int:
        """Take in rows from the first on, as many as there is room for; returns how many.

        Args:
            columns: the same ones each time, [rows, ...].
        """
        taken = min(self.capacity - self._filled, len(next(iter(columns.values()))))
        for name, column in columns.items():
            if name not in self._columns:
                self._columns[name] = torch.empty((self.capacity, *column.shape[1:]), dtype=column.dtype)
            self._columns[name][self._filled : self._filled + taken] = column[:taken]
        self._filled += taken
        return taken

    def draw(self, rows: int) -> dict[str, torch.Tensor]:
        """Take out rows at random, in a random order; all there are if they are fewer."""
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
