"""Edits of a row's projection on a direction: removed (ablation), bounded (capping), or set to a value.

Directional ablation: Arditi et al. 2024, arXiv:2406.11717. Activation capping, as in the assistant axis: Lu et al.
2026, arXiv:2601.10387.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from steercap.core.program import Response
from steercap.errors import InvalidEdit
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


@dataclass(frozen=True, eq=False, repr=False)
class Cap(Edit):
    """Edit that clamps the projection of rows on a vector; rows within the bounds are unchanged.

    h <- h + (clamp(p, low, high) - p) v̂ with p = h·v̂, v̂ = v/‖v‖.

    Args:
        vector: v, [hidden]; its length does not count.
        low: least projection on v̂, in the units of the stream; None for no bound.
        high: greatest projection; None for no bound.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    vector: Vector
    low: float | None = None
    high: float | None = None

    def _check(self) -> None:
        self._keep("vector")
        for bound in ("low", "high"):
            if getattr(self, bound) is not None:
                self._number(bound)
        if self.low is None and self.high is None:
            raise InvalidEdit("Cap: neither low= nor high= is given, so nothing would be bounded; give one")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise InvalidEdit(f"Cap: low={self.low} is above high={self.high}; no projection lies between them")
        unit(self, "vector")

    def lower(self) -> tuple[RankOne, ...]:
        direction = unit(self, "vector")
        low = -inf if self.low is None else self.low
        high = inf if self.high is None else self.high
        return (RankOne(direction, Response(gain=1.0, minus=1.0, low=low, high=high), direction),)


@dataclass(frozen=True, eq=False, repr=False)
class SetProjection(Edit):
    """Edit that sets the projection of rows on a vector to `value`.

    h <- h + (value - h·v̂) v̂ with v̂ = v/‖v‖.

    Args:
        vector: v, [hidden]; its length does not count.
        value: the projection on v̂, in the units of the stream.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    vector: Vector
    value: float

    def _check(self) -> None:
        self._keep("vector")
        self._number("value")
        unit(self, "vector")

    def lower(self) -> tuple[RankOne, ...]:
        direction = unit(self, "vector")
        return (RankOne(direction, Response(offset=self.value, minus=1.0), direction),)


MEMBERS: Final[Mapping[str, type[Edit]]] = {
    "ablate": Ablate,
    "cap": Cap,
    "set_projection": SetProjection,
}
