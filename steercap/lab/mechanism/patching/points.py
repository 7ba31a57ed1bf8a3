"""Grids of layers, sites, heads and positions to patch, and their cells, one run each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from steercap.architectures.sites import SITES
from steercap.core.hints import dataclass
from steercap.core.schema import PointSchema
from steercap.core.spec import CaptureSpec, Layers, Point, parse_layers, parse_sites
from steercap.core.tokens import Tokens, TokenSelection, selected
from steercap.core.values import index_of, parts_of, shown, truth_of
from steercap.errors import InvalidSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Value of `Grid.heads` that stands for all heads.
ALL = "all"


class PatchedPlace(NamedTuple):
    """Place whose rows one run replaces, a cell of a grid.

    Args:
        point: point of the rows.
        head: index of the head whose part of the rows is replaced, None for whole rows.
        positions: positions in the patched prompt, ascending.
    """

    point: Point
    head: int | None
    positions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Grid of places to patch, each in a run of its own: layers × sites × heads × positions.

    Args:
        layers: layers as in `CaptureSpec`; each layer alone.
        sites: one site or several; each site alone.
        tokens: tokens of the prompt, as in `CaptureSpec`; each token alone.
        heads: None for whole rows, or heads of `q`, `k`, `v` and `z`, each alone: one index, several, or "all".
        together: patch all the tokens in one run, rather than each in its own.

    Raises:
        InvalidSpec, InvalidSelection: an argument is of the wrong type.
        UnknownName: a site that does not exist.
    """

    layers: Layers = "all"
    sites: str | Sequence[str] = ("resid_post",)
    tokens: Tokens | TokenSelection = "prompt"
    heads: int | Sequence[int] | str | None = None
    together: bool = False

    def __post_init__(self) -> None:
        keep = object.__setattr__
        keep(self, "layers", parse_layers(self.layers))
        keep(self, "sites", parse_sites(self.sites))
        for site in self.sites:
            _ = SITES[site]
        keep(self, "tokens", TokenSelection.parse(self.tokens))
        keep(self, "heads", _heads(self.heads))
        keep(self, "together", truth_of(self.together, "Grid: together"))

    def capture(self, tokens: Tokens | TokenSelection = "prompt") -> CaptureSpec:
        """Return the spec that captures raw rows of the selected tokens at the grid's points."""
        return CaptureSpec(layers=self.layers, sites=self.sites, tokens=tokens, codec="raw")

    @property
    def selection(self) -> TokenSelection:
        """The field `tokens`, typed as the TokenSelection that it was converted to."""
        assert isinstance(self.tokens, TokenSelection)
        return self.tokens

    def heads_of(self, point: Point, schema: PointSchema) -> Sequence[int | None]:
        """Return the indices of the heads to patch at a point, from 0; (None,) for whole rows.

        Raises:
            InvalidSpec: rows of the point have no heads, or a head is out of range or given twice.
        """
        if self.heads is None:
            return (None,)
        count = head_count(point, schema)
        if self.heads == ALL:
            return range(count)
        assert isinstance(self.heads, tuple)
        if wrong := [head for head in self.heads if not -count <= head < count]:
            raise InvalidSpec(f"Grid: head {wrong[0]}: rows at {point} have {count} heads, 0 to {count - 1}")
        found = [head % count for head in self.heads]
        if len(set(found)) < len(found):
            raise InvalidSpec(f"Grid: heads={list(self.heads)} are {found} of {count} heads; give several that differ")
        return found


@dataclass(frozen=True)
class ResolvedGrid:
    """Grid resolved for a model: its points, and the heads to patch at each, (None,) for whole rows."""

    grid: Grid
    points: tuple[Point, ...]
    heads: Mapping[Point, Sequence[int | None]]

    def cells(self, positions: Sequence[int]) -> Iterator[PatchedPlace]:
        """Yield every cell of the grid in one prompt, site by site, layer by layer, head by head.

        Args:
            positions: positions of the grid's tokens in one prompt.
        """
        groups = [tuple(positions)] if self.grid.together else [(position,) for position in positions]
        for site in self.grid.sites:
            for point in self.points:
                if point.site == site:
                    for head, group in product(self.heads[point], groups):
                        yield PatchedPlace(point, head, group)

    def count(self, positions: int) -> int:
        """Return the number of cells in a prompt with `positions` selected positions."""
        return sum(map(len, self.heads.values())) * (1 if self.grid.together else positions)


def places_of(model: SteerModel, points: Any) -> list[ResolvedGrid]:
    """Resolve a Grid, or several, for a model: its points and heads.

    Raises:
        InvalidSpec: `points` is not a Grid or a list of them, or rows lack a head or are read-only.
        LayerOutOfRange, UnknownName, PointNotArmed: a point has no tap.
    """
    grids = [points] if isinstance(points, Grid) else list(parts_of(points, "points") or [])
    if not grids or not all(isinstance(grid, Grid) for grid in grids):
        raise InvalidSpec(f"points={shown(points)}; give a steercap.lab.mechanism.patching.Grid, or a list of them")
    found = []
    for grid in grids:
        armed = model.check_capture(grid.capture())
        for point in armed:
            check_writable(point, model.points[point])
        heads = {point: grid.heads_of(point, model.points[point]) for point in armed}
        found.append(ResolvedGrid(grid, armed, heads))
    return found


def positions_of(selection: TokenSelection, length: int) -> list[int]:
    """Return the positions selected in a prompt of `length` tokens, ascending.

    Raises:
        InvalidSelection, EmptySelection: the selection does not fit the prompt.
    """
    chosen = selected(selection.ranges(length, length), length)
    return [int(position) for position in np.flatnonzero(chosen)]


def head_count(point: Point, schema: PointSchema) -> int:
    """Return the number of heads in a row of a point.

    Raises:
        InvalidSpec: the row has no heads.
    """
    if len(schema.shape) != 2:
        raise InvalidSpec(f"rows at {point} are {schema}, and have no heads; those of q, k, v and z have")
    return schema.shape[0]


def elements_of(head: int | None, schema: PointSchema) -> slice | None:
    """Return the slice of a head's elements in a flattened row; None, for the whole row, if `head` is None."""
    width = schema.width // schema.shape[0]
    return None if head is None else slice(head * width, (head + 1) * width)


def check_writable(point: Point, schema: PointSchema) -> None:
    """Check that rows of a point can be replaced.

    Raises:
        InvalidSpec: the rows are read-only.
    """
    if not schema.writable:
        raise InvalidSpec(f"rows at {point} can be read but not changed, so they cannot be patched")


def _heads(given: object) -> tuple[int, ...] | str | None:
    if given is None or (isinstance(given, str) and given == ALL):
        return given
    index = index_of(given)
    parts = [given] if index is not None else parts_of(given, "Grid: heads")
    found = [index_of(part) for part in parts or [None]]
    if None in found or len(set(found)) < len(found):
        raise InvalidSpec(f"Grid: heads={shown(given)}; give an index, several that differ, 'all', or None")
    return tuple(head for head in found if head is not None)
