"""Selection of the points and rows of a data set to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from steercap.core.spec import At, Layers, parse_layers, parse_points, parse_sites, resolve_layers
from steercap.core.values import index_of, parts_of, shown
from steercap.errors import InvalidRequest, InvalidSelection, InvalidSpec, LayerOutOfRange
from steercap.lab.datasets.definition import Definition, PointFormat
from steercap.lab.datasets.tables import Index

#: dict: a tensor of each point by its name. concatenate: the rows of a token's points concatenated. mix: each row of
#: each point by itself.
Join: TypeAlias = Literal["dict", "concatenate", "mix"]
#: Function that selects rows of an index: a truth value for each row.
Keep: TypeAlias = Callable[[Index], NDArray[np.bool_]]


@dataclass(frozen=True)
class TokenChoice:
    """Selection of tokens whose rows are read; by default all.

    Args:
        first, end, step: slice of positions in the window; no end for None.
        without: ids of tokens whose rows are left out, such as the beginning-of-text token.
        keep: function from an index to a truth value for each row; importable, if workers are spawned.
    """

    first: int = 0
    end: int | None = None
    step: int = 1
    without: tuple[int, ...] = ()
    keep: Keep | None = None

    @staticmethod
    def parse(positions: Any, without: Any, keep: Keep | None) -> TokenChoice:
        """Return the selection for a user's arguments; None means no restriction.

        Raises:
            InvalidSelection: positions are not a forward slice from 0 on, or token ids are not whole numbers.
        """
        given = slice(None) if positions is None else positions
        if isinstance(given, range):
            given = slice(given.start, given.stop, given.step)
        parts = [given.start, given.stop, given.step] if isinstance(given, slice) else [-1]
        if any(part is not None and (index_of(part) is None or part < 0) for part in parts) or parts[-1] == 0:
            raise InvalidSelection(f"positions={shown(positions)}; give a slice from 0 on, such as slice(1, None)")
        several = [] if without is None else parts_of(without, "without_tokens")
        tokens = [without] if several is None else several
        if any(index_of(token) is None for token in tokens):
            raise InvalidSelection(f"without_tokens={shown(without)}; give token ids")
        return TokenChoice(given.start or 0, given.stop, given.step or 1, tuple(map(int, tokens)), keep)

    @property
    def all(self) -> bool:
        """True if every row is selected."""
        return self == TokenChoice()

    def offsets(self, index: Index) -> NDArray[np.int64]:
        """Return the offsets of the selected rows, ascending: int64 [chosen]."""
        chosen = np.ones(len(index), dtype=bool)
        position = index.position.astype(np.int64)
        chosen &= (position >= self.first) & ((position - self.first) % self.step == 0)
        if self.end is not None:
            chosen &= position < self.end
        if self.without:
            chosen &= ~np.isin(index.token, self.without)
        if self.keep is not None:
            kept = np.asarray(self.keep(index))
            if kept.dtype != np.bool_ or kept.shape != chosen.shape:
                raise InvalidSelection(
                    f"keep= gave {kept.dtype} {kept.shape} of {len(index)} rows; give a truth value each"
                )
            chosen &= kept
        return np.flatnonzero(chosen)


def points_of(
    definition: Definition, layers: Layers = "all", sites: str | Sequence[str] | None = None, at: Any = None
) -> tuple[PointFormat, ...]:
    """Return the selected points of a data set, in its order.

    Args:
        definition: definition of the data set.
        layers: layers as in `CaptureSpec`; negative ones count from the model's last.
        sites: one site or several; None for all that were collected.
        at: points by name or by layer and site, instead.

    Raises:
        LayerOutOfRange: a selected point was not collected.
        InvalidSpec: layers or sites are given beside `at`, or negative layers of a model of unknown depth.
    """
    if at is not None:
        if layers != "all" or sites is not None:
            raise InvalidSpec("at= says which points are meant; leave layers= and sites= out beside it")
        return _at(definition, at)
    wanted = None if sites is None else parse_sites(sites)
    known = {point.layer for point in definition.points}
    chosen = known if _is_all(layers) else set(resolve_layers(layers, _layers_of(definition, layers)))
    found = tuple(p for p in definition.points if p.layer in chosen and (wanted is None or p.site in wanted))
    asked = chosen if not _is_all(layers) else set()
    if not found or asked - {point.layer for point in found} or set(wanted or ()) - {point.site for point in found}:
        raise _lacking(definition, f"layers={shown(layers)}, sites={shown(sites)}")
    return found


def _is_all(layers: Layers) -> bool:
    return isinstance(layers, str) and parse_layers(layers) == "all"


def _layers_of(definition: Definition, layers: Layers) -> int:
    if definition.num_layers:
        return definition.num_layers
    parts = parts_of(layers, "layers") or [layers]
    if any((index := index_of(part)) is None or index < 0 for part in parts):
        raise InvalidSpec(f"layers={shown(layers)}: how many layers the model has is not known; name them from 0")
    return max(point.layer for point in definition.points) + 1


def _at(definition: Definition, at: At | Sequence[At]) -> tuple[PointFormat, ...]:
    found = []
    for name in parse_points(at):
        layer = name.layer
        if layer is not None and layer < 0:
            layer += _layers_of(definition, layer)
        here = [p for p in definition.points if p.site == name.site and layer in {None, p.layer}]
        if not here:
            raise _lacking(definition, shown(at))
        found += here
    return tuple(dict.fromkeys(found))


def _lacking(definition: Definition, asked: str) -> LayerOutOfRange:
    return LayerOutOfRange(
        f"{asked}: it was not collected; collected: {', '.join(str(p.point) for p in definition.points)}"
    )


def check_alike(points: Sequence[PointFormat], why: str) -> None:
    """Check that the rows of all points have one shape.

    Raises:
        InvalidRequest: the shapes differ; the message begins with `why`.
    """
    if len({point.shape for point in points}) > 1:
        shapes = ", ".join(f"{point.point} of {point.shape}" for point in points)
        raise InvalidRequest(
            f"{why} needs points of one shape, and these are {shapes}; choose some by layers= and sites="
        )
