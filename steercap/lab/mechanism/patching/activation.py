"""Activation patching: rows of one run replace those of another, one place in each run (arXiv:2202.05262).

Ablation replaces rows by zeros, or by the mean row of other texts. `over_grids` is the loop of both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from jaxtyping import Float

from steercap.core.protocols import ProgressCallback
from steercap.core.spec import Point
from steercap.core.tokens import BUT_THE_FIRST, Tokens, TokenSelection
from steercap.core.values import shown, warn
from steercap.errors import EmptySelection, InvalidPrompt, InvalidSpec
from steercap.lab.directions.extraction import CALL_TEXTS, Text, ids_of
from steercap.lab.mechanism.patching.metrics import Metric
from steercap.lab.mechanism.patching.points import Grid, PatchedPlace, ResolvedGrid, places_of, positions_of
from steercap.lab.mechanism.patching.results import Effects, PatchEffect, effect_of
from steercap.lab.mechanism.patching.running import (
    CONCURRENCY,
    ROTATED,
    Align,
    Direction,
    Pair,
    PatchSource,
    Runs,
    decoded,
    pairs_of,
    replaced,
    texts_of,
)
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel


class Given(NamedTuple):
    """Replacement rows for the places of one grid, for one pair of prompts.

    Args:
        value: metric of the run that the rows come from; None if rows come from no run.
        rows: function that returns the replacement rows of a place: [positions, width].
    """

    value: float | None
    rows: Callable[[PatchedPlace], torch.Tensor]


async def over_grids(
    runs: Runs,
    pairs: Sequence[Pair],
    places: Sequence[ResolvedGrid],
    positions: Callable[[Pair, Grid], Sequence[int]],
    given: Callable[[Pair, ResolvedGrid, Sequence[int]], Awaitable[Given]],
) -> Effects:
    """Run each pair once for each cell of each grid with the cell's rows replaced, and return the effects.

    Args:
        runs: runner of the experiment.
        pairs: the prompts.
        places: the grids.
        positions: function that returns the positions of a grid's tokens in the patched prompt of a pair.
        given: function that returns the replacement rows for a pair, grid and positions; called when the grid's runs
            begin; its result is in memory until they are done.

    Raises:
        InvalidSpec, InvalidSelection: a grid does not fit a prompt; raised before anything runs.
    """
    asked = [(pair, [(place, positions(pair, place.grid)) for place in places]) for pair in pairs]
    runs.total = sum(place.count(len(at)) for _, each in asked for place, at in each)

    async def one_grid(pair: Pair, place: ResolvedGrid, at: Sequence[int], base: float) -> list[PatchEffect]:
        value, rows = await given(pair, place, at)

        async def one_cell(cell: PatchedPlace) -> PatchEffect:
            change = SteeringSpec([replaced(runs.model, cell, rows(cell))])
            found = await runs.value(pair.number, pair.base, change)
            return effect_of(pair, cell, value=found, base=base, source=value, together=place.grid.together)

        return await runs.each_change(place.cells(at), one_cell)

    async def one_pair(asked: tuple[Pair, list[tuple[ResolvedGrid, Sequence[int]]]]) -> list[PatchEffect]:
        pair, each = asked
        base = await runs.value(pair.number, pair.base)
        return [effect for place, at in each for effect in await one_grid(pair, place, at, base)]

    found = await runs.each_pair(asked, one_pair)
    return Effects([effect for effects in found for effect in effects], [pair.tokens for pair in pairs])


async def patch(
    model: SteerModel,
    clean: Text | Sequence[Text],
    corrupted: Text | Sequence[Text],
    points: Grid | Sequence[Grid],
    *,
    metric: Metric,
    direction: Direction = "denoise",
    align: Align | None = None,
    concurrency: int = CONCURRENCY,
    progress: ProgressCallback | None = None,
) -> Effects:
    """Patch rows of one run into another, each place of a grid in its own run, and measure the effects on a metric.

    All runs of all pairs share the engine's batches. Patched rows are bit-identical to those captured in the other run;
    a run in which a row was not patched raises.

    Args:
        model: an open model, with the grid's points armed.
        clean, corrupted: a prompt each, or lists of equal length: str, token ids, or `Exchange`. The prompts of a pair
            must have equally many tokens, unless `align` says otherwise.
        points: a `Grid`, or several.
        metric: metric of a run: `LogitDifference`, `LogProbability`, `Measured`, or your own.
        direction: "denoise" puts clean rows into the corrupted run, to find places sufficient to restore the answer.
            "noise" puts corrupted rows into the clean run, to find places necessary for it.
        align: "end" aligns prompts of different lengths by their last tokens; tokens of the patched prompt without a
            counterpart are left out. Not for `q` and `k`, whose rows depend on their positions.
        concurrency: maximum concurrent runs.
        progress: function called with a `Progress` whenever the work advances.

    Returns:
        The effect of every place, in each pair.

    Raises:
        InvalidPrompt: the prompts of a pair have different lengths, and `align` was not given.
        InvalidSpec: a grid, metric, direction or number of prompts is not valid.
        PointNotArmed: the engine has no tap at a point.
        The errors of `SteerModel.generate`, SteeringNotApplied among them.
    """
    pairs = await pairs_of(model, clean, corrupted, direction=direction, align=align)
    places = places_of(model, points)
    runs = Runs(model, metric, len(pairs), concurrency, progress)

    async def given(pair: Pair, place: ResolvedGrid, positions: Sequence[int]) -> Given:
        spec = place.grid.capture([position + pair.shift for position in positions])
        value, source = await runs.read(pair.number, pair.source, spec)
        return Given(value, partial(_beside, source, pair.shift))

    return await over_grids(runs, pairs, places, _positions, given)


def _positions(pair: Pair, grid: Grid) -> list[int]:
    """Return a grid's positions in the patched prompt that have a counterpart in the other prompt, ascending.

    Raises:
        EmptySelection, InvalidSpec: there is none; or lengths differ, and rows of a site depend on their positions.
    """
    if pair.shift and (held := sorted(ROTATED.intersection(grid.sites))):
        raise InvalidSpec(
            f"pair {pair.number} has prompts of {len(pair.base)} and {len(pair.source)} tokens, and rows of "
            f"{' and '.join(held)} hold the position that they were computed at; patch other sites, or prompts "
            "of equal length"
        )
    found = [position for position in positions_of(grid.selection, len(pair.base)) if position + pair.shift >= 0]
    if not found:
        raise EmptySelection(
            f"pair {pair.number}: no token of tokens={grid.selection} has one of the other prompt beside it"
        )
    return found


def _beside(source: PatchSource, shift: int, cell: PatchedPlace) -> torch.Tensor:
    """Return the rows of the other prompt for a cell, `shift` positions on: [positions, width]."""
    return source.at(cell.point, [position + shift for position in cell.positions])


#: Replacement of rows: zeros, the mean row of texts at the same position, or their mean row over all positions.
Ablation: TypeAlias = Literal["zero", "position_mean", "mean"]


@dataclass(frozen=True)
class Fill:
    """Replacement rows of an ablation.

    Args:
        rows: float32 [1, width] or [positions, width] by point, the dimensions of a row flattened.
        by_position: True if there is a row for each position.
    """

    rows: dict[Point, Float[torch.Tensor, "positions width"]]
    by_position: bool

    def at(self, cell: PatchedPlace) -> Float[torch.Tensor, "positions width"]:
        """Return the replacement rows at a cell's positions."""
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
    concurrency: int = CONCURRENCY,
    progress: ProgressCallback | None = None,
) -> Effects:
    """Ablate rows, each place of a grid in its own run, and measure the effects on a metric.

    Args:
        model: an open model, with the grid's points armed.
        prompts: one prompt or several: str, token ids, or `Exchange`.
        points: a `Grid`, or several.
        metric: metric of a run, as for `patch`.
        to: replacement of rows: "zero"; "position_mean", the mean row of the reference texts at the same position, for
            texts all as long as the prompts; or "mean", the mean row of the `reference_tokens` of these texts.
        reference: texts to average rows over; the prompts themselves by default.
        reference_tokens: tokens of the reference texts to average for "mean": by default all but the first, whose row
            in most models is an attention sink, a hundred times as long as the others.
        concurrency, progress: as for `patch`.

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
    ids = await _ids(model, prompts, "prompts")
    others = ids if reference is None else await _ids(model, reference, "reference")
    if by_position := to == "position_mean":
        _check_alike([*ids, *others])
    selection = TokenSelection.parse("all" if by_position else reference_tokens)
    pairs = [Pair(number, one, one, decoded(model.tokenizer, one)) for number, one in enumerate(ids)]
    places = places_of(model, points)
    if to == "mean" and any(ROTATED.intersection(place.grid.sites) for place in places):
        warn("to='mean' at q or k: their rows depend on their positions, which to='position_mean' keeps apart")
    runs = Runs(model, metric, len(pairs), concurrency, progress)
    fills = {
        id(place): _zeros(model, place)
        if to == "zero"
        else await _means(model, place, others, selection, by_position=by_position)
        for place in places
    }

    async def given(_pair: Pair, place: ResolvedGrid, _positions: Sequence[int]) -> Given:
        return Given(None, fills[id(place)].at)

    return await over_grids(runs, pairs, places, _ablated_positions, given)


async def _ids(model: SteerModel, texts: Text | Sequence[Text], what: str) -> list[tuple[int, ...]]:
    return [tuple(ids) for ids in await ids_of(model, texts_of(texts, what))]


def _ablated_positions(pair: Pair, grid: Grid) -> list[int]:
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
    """Capture texts at the points of a grid and return their mean rows, by position or over the selected tokens."""
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
