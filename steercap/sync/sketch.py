"""Running sketch for blocking callers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from steercap.core.ownership import NonCopyable
from steercap.requests import sketching

if TYPE_CHECKING:
    import torch

    from steercap.captures.sketch import Sketch
    from steercap.core.spec import Layers, Point
    from steercap.core.tokens import TokenSelection
    from steercap.steering.directions import DirectionSet


class RunningSketch(NonCopyable, instead=sketching.INSTEAD):
    """Statistics of the rows of every request made in a context: `steercap.RunningSketch` without `await`.

    Attributes:
        awaited: the asynchronous `steercap.RunningSketch`.
    """

    def __init__(self, awaited: sketching.RunningSketch, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.awaited = awaited
        self._run = run

    @property
    def kind(self) -> str:
        """Kind of the sketch; see `Sketch`."""
        return self.awaited.kind

    @property
    def size(self) -> int:
        """Number of rows of a frequent directions sketch; 0 for other kinds."""
        return self.awaited.size

    @property
    def points(self) -> tuple[Point, ...]:
        """Points of the sketch, layer by layer."""
        return self.awaited.points

    @property
    def tokens(self) -> TokenSelection:
        """Selection of the tokens whose rows are added."""
        return self.awaited.tokens

    @property
    def requests(self) -> int:
        """Number of requests in the sketch."""
        return self.awaited.requests

    @property
    def rows(self) -> int:
        """Number of rows of each point in the sketch."""
        return self.awaited.rows

    def mean(self, layer: int, site: str | None = None) -> torch.Tensor:
        """Return the mean of the rows of a point so far; see `Sketch.mean`."""
        found: torch.Tensor = self._run(self.awaited.mean(layer, site))
        return found

    def variance(self, layer: int, site: str | None = None) -> torch.Tensor:
        """Return the variance of each element so far; see `Sketch.variance`."""
        found: torch.Tensor = self._run(self.awaited.variance(layer, site))
        return found

    def covariance(self, layer: int, site: str | None = None) -> torch.Tensor:
        """Return the covariance of the elements so far; see `Sketch.covariance`."""
        found: torch.Tensor = self._run(self.awaited.covariance(layer, site))
        return found

    def principal_directions(self, layers: Layers, k: int, site: str | None = None) -> DirectionSet:
        """Return the first k principal directions so far; see `Sketch.principal_directions`."""
        found: DirectionSet = self._run(self.awaited.principal_directions(layers, k, site))
        return found

    def fetch(self) -> Sketch:
        """Return the sketch of all points so far; see `steercap.RunningSketch.fetch`."""
        found: Sketch = self._run(self.awaited.fetch())
        return found

    def __repr__(self) -> str:
        return repr(self.awaited)
