"""Removal of a direction from rows: directional ablation (Arditi et al. 2024, arXiv:2406.11717)."""

from __future__ import annotations

from dataclasses import dataclass

from steercap.core.program import Response
from steercap.steering.edits import Edit, RankOne, Vector, unit


@dataclass(frozen=True, eq=False, repr=False)
class Ablate(Edit):
    """Edit that scales the projection of rows on a vector, to 0 by default.

    h <- h + (keep - 1) (h·v̂) v̂ with v̂ = v/‖v‖.

    Args:
        vector: v, [hidden]; its length does not count.
        keep: fraction of the projection that stays: 0 removes it, 1 changes nothing, 2 doubles it.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    vector: Vector
    keep: float = 0.0

    def _check(self) -> None:
        self._keep("vector")
        self._number("keep")
        unit(self, "vector")

    def lower(self) -> tuple[RankOne, ...]:
        direction = unit(self, "vector")
        return (RankOne(direction, Response(gain=self.keep - 1), direction),)


MEMBER = Ablate
