"""Setting of a projection to a value."""

from __future__ import annotations

from dataclasses import dataclass

from steercap.core.program import Response
from steercap.steering.edits import Edit, RankOne, Vector, unit


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


MEMBER = SetProjection
