"""Put rows in the place of others: activation patching (Meng et al. 2022, arXiv:2202.05262)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from steercap.core.tokens import TokenSelection
from steercap.edits.base import Edit, RankOne, Vector
from steercap.errors import InvalidEdit, InvalidVector


@dataclass(frozen=True, eq=False)
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
        try:
            given = self.positions if isinstance(self.positions, Iterable) else (self.positions,)
            positions = tuple(operator.index(position) for position in given)
        except TypeError as error:
            raise InvalidEdit(f"Replace: positions={self.positions!r}; give integers") from error
        if isinstance(self.rows, (torch.Tensor, list, tuple)) and torch.as_tensor(self.rows).dim() == 1:
            object.__setattr__(self, "rows", torch.as_tensor(self.rows)[None])
        rows = self._keep("rows", "positions width")
        if len(rows) != len(positions) or not positions:
            raise InvalidVector(f"Replace: {len(rows)} rows for {len(positions)} positions; give one row each")
        if len(set(positions)) < len(positions):
            raise InvalidEdit(f"Replace: positions={list(positions)} names a position twice; which row is meant?")
        selection = TokenSelection.parse(positions)
        if self.selection not in {TokenSelection.parse("all"), selection}:
            raise InvalidEdit("Replace: positions says which tokens; do not give tokens= too")
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "tokens", selection)

    @property
    def replaced(self) -> tuple[int, ...]:
        assert isinstance(self.positions, tuple)
        return self.positions

    def lower(self) -> tuple[RankOne, ...]:
        assert isinstance(self.rows, torch.Tensor)
        return (RankOne(self.rows, replaces=True),)


MEMBER = Replace
