"""Edits that replace rows by others, or that remove, bound or set a row's projection on a direction.

Activation patching: Meng et al. 2022, arXiv:2202.05262. Directional ablation: Arditi et al. 2024, arXiv:2406.11717.
Activation capping, as in the assistant axis: Lu et al. 2026, arXiv:2601.10387.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import KW_ONLY
from math import inf
from typing import Any, Final, cast

import torch

from steercap.core.hints import dataclass
from steercap.core.program import HOLE, Response
from steercap.core.tokens import TokenSelection
from steercap.core.values import Mask, index_of, mask_of, parts_of, plain, shown
from steercap.errors import InvalidEdit, InvalidVector
from steercap.steering.edits import Edit, RankOne, Vector, unit


@dataclass(frozen=True, eq=False, repr=False)
class Replace(Edit):
    """Edit that replaces the rows at positions by given ones, such as another request's: h[positions] <- rows.

    The first row goes to the first position. This is the one edit that is not rank-one.

    Args:
        rows: [positions, width], or [width] for one position; rounded to the dtype of the point's rows.
        positions: one position or several, all different; negative counts from the end of the prompt. Or a mask, with a
            truth value for each prompt token or for each of prompt + `max_tokens` - 1 positions: the first row goes to
            the first that is true.
        elements: elements of each row that are replaced; the others keep their values: a slice, a range, indices, or a
            mask with a truth value for each. None for all of them.
        layer, layers, site, part, model: see `Edit`; with `part` a row is that of a part, such as a head of `z`.
        tokens: not given; `positions` selects the tokens.
    """

    rows: Vector
    positions: int | Sequence[int] | Sequence[bool] | Mask
    elements: slice | Sequence[int] | Sequence[bool] | Mask | None = None

    def _check(self) -> None:
        positions = self._positions()
        places = positions.places if isinstance(positions, Mask) else positions
        rows = self._keep("rows", "positions width", "width")
        if rows.dim() == 1:
            rows = rows[None]
            object.__setattr__(self, "rows", rows)
        if len(rows) != len(places) or not places:
            raise InvalidVector(f"Replace: {len(rows)} rows for {len(places)} positions; give one row each")
        if len(set(places)) < len(places):
            raise InvalidEdit(f"Replace: positions={shown(places)} names a position twice; give each position once")
        selection = TokenSelection.parse(positions)
        if self.selection not in {TokenSelection.parse("all"), selection}:
            raise InvalidEdit("Replace: positions says which tokens; do not give tokens= too")
        if (rows == HOLE).any():
            raise InvalidVector(
                f"Replace: rows hold {HOLE:g}, a value that steercap reserves; check how the rows were computed"
            )
        if self.elements is not None:
            object.__setattr__(self, "elements", _elements(self.elements, rows.shape[-1]))
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "tokens", selection)

    def _positions(self) -> tuple[int, ...] | Mask:
        """Return `positions` as integers, in the order of the rows, or as a mask, after checking them."""
        given = plain(self.positions)
        if isinstance(given, Mask):
            return given
        if (position := index_of(given)) is not None:
            return (position,)
        unordered = isinstance(given, AbstractSet)
        parts = None if unordered else parts_of(given, "Replace: positions", InvalidEdit)
        if parts is None:
            raise InvalidEdit(
                f"Replace: positions={shown(given)}; give integers, in the order of the rows, or a mask of truth values"
            )
        if (mask := mask_of(parts)) is not None:
            return mask
        found = [index_of(part) for part in parts]
        if None in found:
            raise InvalidEdit(f"Replace: positions={shown(given)}; give integers, or a mask of truth values alone")
        return tuple(position for position in found if position is not None)

    @property
    def replaced(self) -> tuple[int, ...]:
        assert isinstance(self.positions, (tuple, Mask))
        return self.positions.places if isinstance(self.positions, Mask) else self.positions

    def lower(self) -> tuple[RankOne, ...]:
        rows = self.rows
        assert isinstance(rows, torch.Tensor)
        if self.elements is not None:
            kept = torch.ones(rows.shape[-1], dtype=torch.bool)
            kept[list(cast("tuple[int, ...]", self.elements))] = False
            rows[:, kept] = HOLE
        return (RankOne(rows, replaces=True),)


def _elements(given: object, width: int) -> tuple[int, ...]:
    """Return the indices, ascending, of the elements to replace in rows of `width` elements."""
    parts: list[Any] | None = None
    if isinstance(given, slice):
        with suppress(TypeError, ValueError):
            parts = list(range(width)[given])
    elif isinstance(given, Mask):
        parts = given.tolist()
    else:
        parts = parts_of(given, "Replace: elements", InvalidEdit)
    mask = mask_of(parts or [])
    if mask is not None and len(mask) != width:
        raise InvalidEdit(f"Replace: elements= is a mask of {len(mask)} truth values for rows of {width} elements")
    found = [index_of(part) for part in parts or ()] if mask is None else list(mask.places)
    places = [place for place in found if place is not None and -width <= place < width]
    if not places or len(places) < len(found):
        raise InvalidEdit(
            f"Replace: elements={shown(given)} for rows of {width} elements; give a slice, indices, or a mask, of one "
            "element at least"
        )
    return tuple(sorted({place % width for place in places}))


@dataclass(frozen=True, eq=False, repr=False)
class Ablate(Edit):
    """Edit that multiplies the projection of rows on a vector by `keep`, by default 0.

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
    """Edit that clamps the projection of rows on a vector to bounds; rows within the bounds are unchanged.

    h <- h + (clamp(p, low, high) - p) v̂ with p = h·v̂, v̂ = v/‖v‖.

    Args:
        vector: v, [hidden]; its length does not count.
        low: least projection on v̂, in the units of the stream; None for no bound.
        high: greatest projection; None for no bound.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    vector: Vector
    _: KW_ONLY
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
        value: projection on v̂ after the edit, in the units of the stream.
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
    "replace": Replace,
}
