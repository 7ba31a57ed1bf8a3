"""Put rows in the place of others: activation patching (Meng et al. 2022, arXiv:2202.05262)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import SupportsIndex

import torch

from steercap.core.tokens import TokenSelection
from steercap.edits.base import Edit, RankOne, Vector
from steercap.errors import InvalidEdit, InvalidVector


@dataclass(frozen=True, eq=False, repr=False)
class Replace(Edit):
    """h[positions] <- rows, the first row at the first position: for instance rows captured from another request.

    The one edit that is not rank-one.

    Args:
        rows: [positions, hidden], or [hidden] for one position; rounded to the model's dtype where they are put.
        positions: one position or several, all different; negative counts from the end of the prompt.
        layer, layers, site: see `Edit`; `tokens` is what `positions` says.
    """

    rows: Vector
    positions: int | Sequence[int]

    def _check(self) -> None:
        positions = self._positions()
        rows = self._keep("rows", "positions width", "width")
        if rows.dim() == 1:
            rows = rows[None]
            object.__setattr__(self, "rows", rows)
        if len(rows) != len(positions) or not positions:
            raise InvalidVector(f"Replace: {len(rows)} rows for {len(positions)} positions; give one row each")
        if len(set(positions)) < len(positions):
            raise InvalidEdit(f"Replace: positions={list(positions)} names a position twice; which row is meant?")
        selection = TokenSelection.parse(positions)
        if self.selection not in {TokenSelection.parse("all"), selection}:
            raise InvalidEdit("Replace: positions says which tokens; do not give tokens= too")
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "tokens", selection)

    def _positions(self) -> tuple[int, ...]:
        """The positions as integers, in the order of the rows."""
        if isinstance(self.positions, SupportsIndex) and getattr(self.positions, "ndim", 0) == 0:
            return (operator.index(self.positions),)
        if not isinstance(self.positions, Iterable) or isinstance(self.positions, (AbstractSet, str)):
            raise InvalidEdit(f"Replace: positions={self.positions!r}; give integers, in the order of the rows")
        try:
            return tuple(operator.index(position) for position in self.positions)
        except TypeError as error:
            raise InvalidEdit(f"Replace: positions={self.positions!r}; give integers") from error

    @property
    def replaced(self) -> tuple[int, ...]:
        assert isinstance(self.positions, tuple)
        return self.positions

    def lower(self) -> tuple[RankOne, ...]:
        assert isinstance(self.rows, torch.Tensor)
        return (RankOne(self.rows, replaces=True),)


MEMBER = Replace
