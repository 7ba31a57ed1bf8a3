"""Ablation, a place at a time: rows are replaced by zeros, or by the mean of rows of other texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float

from steercap.core.spec import Point
from steercap.core.tokens import BUT_THE_FIRST, Tokens, TokenSelection
from steercap.core.values import shown
from steercap.errors import InvalidPrompt, InvalidSpec
from steercap.lab.directions.extraction import CALL_TEXTS, Text, ids_of
from steercap.lab.mechanism.patching.grids import Given, over_grids
from steercap.lab.mechanism.patching.metrics import Metric
from steercap.lab.mechanism.patching.pairs import Pair, decoded, texts_of
from steercap.lab.mechanism.patching.points import Grid, PatchedPlace, ResolvedGrid, places_of, positions_of
from steercap.lab.mechanism.patching.results import Effects
from steercap.lab.mechanism.patching.running import CONCURRENT, Runs

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Replacement of rows: zeros, the mean row of a position, or the mean row of all positions.
Ablation: TypeAlias = Literal["zero", "position_mean", "mean"]


@dataclass(frozen=True)
class Fill:
    """Replacement rows of an ablation.

    Args:
        rows: flat float32 rows of each point, either one, or one for each position.
        by_position: True if there is a row for each position.
    """

    rows: dict[Point, Float[torch.Tensor, "positions width"]]
    by_position: bool

    def at(self, cell: PatchedPlace) -> Float[torch.Tensor, "positions width"]:
        """Return the rows for a cell."""
        rows = self.rows[cell.point]
        return rows[list(cell.positions)] if self.by_position else rows.expand(len(cell.positions), -1)


async def ablate(
    model: SteerModel,
    prompts: Text | Sequence[Text],
    points: Grid | Sequence[Grid],
    *,
    metric: Metric,
    to: Ablation = "zero",
    reference: Sequence[Text] | None = None,
    reference_tokens: Tokens | TokenSelection = BUT_THE_FIRST,
    concurrent: int = CONCURRENT,
    progress: Callable[[int, int], None] | None = None,
) -> Effects:
    """Ablate rows at each place of a grid, in a run of its own, and measure the effect.

    Args:
        model: an open model, with the grid's points armed.
        prompts: one prompt or several: str, token ids, or `Exchange`.
        points: a `Grid`, or several.
        metric: metric of a run, as for `patch`.
        to: replacement of rows: "zero"; "position_mean", the mean row of the reference texts at the same position, all
            of them as long as the prompts; or "mean", the mean row of all their tokens.
        reference: texts to take means over; the prompts themselves by default.
        reference_tokens: tokens of them to average for "mean": by default all but the first, whose row in most models
            is an attention sink, a hundred times as long as the others.
        concurrent: maximum concurrent runs.
        progress: function called with the number of finished changed runs, and of all.

    Returns:
        The effect of every place, for each prompt; `source` is None.

    Raises:
        InvalidPrompt: "position_mean" is given, and texts have different lengths.
        InvalidSpec: a grid, metric or other argument is not valid.
        PointNotArmed: the engine has no tap at a point.
        The errors of `SteerModel.generate`, SteeringNotApplied among them.
    """
    if to not in get_args(Ablation):
        raise InvalidSpec(f"to={shown(to)}; give one of {', '.join(map(repr, get_args(Ablation)))}")
    if to == "zero" and reference is not None:
        raise InvalidSpec("reference= is for means, and to='zero' takes none; leave it out, or give to='mean'")
    ids = _ids(model, prompts, "prompts")
    others = ids if reference is None else _ids(model, reference, "reference")
    by_position = to == "position_mean"
    if by_position:
        _check_alike([*ids, *others])
    selection = TokenSelection.parse("all" if by_position else reference_tokens)
    pairs = [Pair(number, one, one, decoded(model.tokenizer, one)) for number, one in enumerate(ids)]
    places = places_of(model, points)
    runs = Runs(model, metric, len(pairs), concurrent, progress)
    fills = {
        id(place): _zeros(model, place)
        if to == "zero"
        else await _means(model, place, others, selection, by_position=by_position)
        for place in places
    }

    async def given(_pair: Pair, place: ResolvedGrid, _positions: Sequence[int]) -> Given:
        return Given(None, fills[id(place)].at)

    return await over_grids(runs, pairs, places, _positions, given)


def _ids(model: SteerModel, texts: Text | Sequence[Text], what: str) -> list[tuple[int, ...]]:
    return [tuple(ids) for ids in ids_of(model.tokenizer, texts_of(texts, what))]


def _positions(pair: Pair, grid: Grid) -> list[int]:
    return positions_of(grid.selection, len(pair.base))


def _check_alike(prompts: Sequence[Sequence[int]]) -> None:
    lengths = sorted({len(one) for one in prompts})
    if len(lengths) > 1:
        raise InvalidPrompt(
            f"to='position_mean': prompts and reference texts have {lengths} tokens, so that a position is "
            "not the same place in each; make them alike, or give to='mean'"
        )


def _zeros(model: SteerModel, place: ResolvedGrid) -> Fill:
    return Fill({point: torch.zeros(1, model.points[point].width) for point in place.points}, by_position=False)


async def _means(
    model: SteerModel,
    place: ResolvedGrid,
    texts: Sequence[Sequence[int]],
    selection: TokenSelection,
    *,
    by_position: bool,
) -> Fill:
    """Compute mean rows of texts at the points of a grid, summed in float64."""
    sums: dict[Point, Any] = {}
    count = 0
    for first in range(0, len(texts), CALL_TEXTS):
        part = [{"prompt_token_ids": list(ids)} for ids in texts[first : first + CALL_TEXTS]]
        handles = await model.read(part, capture=place.grid.capture(selection), steering=None)
        await model.fetch_captures_batch(handles)
        for handle in handles:
            for point, rows in handle.captures.items():
                wide = rows.flatten(1).double()
                sums[point] = sums.get(point, 0) + (wide if by_position else wide.sum(0, keepdim=True))
            count += 1 if by_position else len(handle.positions)
            handle.release()
    return Fill({point: (found / count).float() for point, found in sums.items()}, by_position=by_position)
