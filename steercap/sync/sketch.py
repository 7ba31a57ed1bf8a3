"""A sketch that requests join, for callers that do not await."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from steercap.core.ownership import Unshared
from steercap.requests import sketching

if TYPE_CHECKING:
    import torch

    from steercap.captures.sketch import Sketch
    from steercap.core.spec import Layers, Point
    from steercap.core.tokens import TokenSelection
    from steercap.steering.directions import DirectionSet


class RunningSketch(Unshared, instead=sketching.INSTEAD):
    """`steercap.RunningSketch` without `await`: statistics of the rows of every request made in the context.

    Attributes:
        awaited: the `steercap.RunningSketch` behind this one.
    """

    def __init__(self, awaited: sketching.RunningSketch, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.awaited = awaited
        self._run = run

    @property
    def kind(self) -> str:
        """What it is; see `Sketch`."""
        return self.awaited.kind

    @property
    def size(self) -> int:
        """Of frequent directions, how many rows; 0 for other kinds."""
        return self.awaited.size

    @property
    def points(self) -> tuple[Point, ...]:
        """The points that are sketched, layer by layer."""
        return self.awaited.points

    @property
    def tokens(self) -> TokenSelection:
        """Which tokens' rows are sketched."""
        return self.awaited.tokens

    @property
    def requests(self) -> int:
        """Requests that are in it."""
        return self.awaited.requests

    @property
    def rows(self) -> int:
        """Rows of each point that are in it."""
        return self.awaited.rows

    def mean(self, layer: int, site: str | None = None) -> torch.Tensor:
        """The mean of the rows of a point so far; see `Sketch.mean`."""
        found: torch.Tensor = self._run(self.awaited.mean(layer, site))
        return found

    def variance(self, layer: int, site: str | None = None) -> torch.Tensor:
        """The variance of each element so far; see `Sketch.variance`."""
        found: torch.Tensor = self._run(self.awaited.variance(layer, site))
        return found

    def covariance(self, layer: int, site: str | None = None) -> torch.Tensor:
        """The covariance of the elements so far; see `Sketch.covariance`."""
        found: torch.Tensor = self._run(self.awaited.covariance(layer, site))
        return found

    def principal_directions(self, layers: Layers, k: int, site: str | None = None) -> DirectionSet:
        """The first k principal directions so far; see `Sketch.principal_directions`."""
        found: DirectionSet = self._run(self.awaited.principal_directions(layers, k, site))
        return found

    def fetch(self) -> Sketch:
        """What is known so far of all points; see `steercap.RunningSketch.fetch`."""
        found: Sketch = self._run(self.awaited.fetch())
        return found

    def __repr__(self) -> str:
        return repr(self.awaited)
