"""Activation patching: rows of one run are put into another, a place at a time (arXiv:2202.05262)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from steercap.errors import EmptySelection, InvalidSpec
from steercap.lab.directions.extraction import Text
from steercap.lab.mechanism.patching.grids import Given, over_grids
from steercap.lab.mechanism.patching.metrics import Metric
from steercap.lab.mechanism.patching.pairs import ROTATED, Align, Direction, Pair, pairs_of
from steercap.lab.mechanism.patching.points import Grid, PatchedPlace, ResolvedGrid, places_of, positions_of
from steercap.lab.mechanism.patching.results import Effects
from steercap.lab.mechanism.patching.running import CONCURRENT, PatchSource, Runs

if TYPE_CHECKING:
    from steercap.model import SteerModel


async def patch(
    model: SteerModel,
    clean: Text | Sequence[Text],
    corrupted: Text | Sequence[Text],
    points: Grid | Sequence[Grid],
    *,
    metric: Metric,
    direction: Direction = "denoise",
    align: Align | None = None,
    concurrent: int = CONCURRENT,
    progress: Callable[[int, int], None] | None = None,
) -> Effects:
    """Patch rows of one run into another, at each place of a grid in a run of its own, and measure the effect.

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
        align: "end" aligns prompts of different lengths by their last tokens; tokens of the run that is changed without
            a counterpart are left out. Not for `q` and `k`, whose rows depend on their positions.
        concurrent: maximum concurrent runs.
        progress: function called with the number of finished patched runs, and of all.

    Returns:
        The effect of every place, in each pair.

    Raises:
        InvalidPrompt: the prompts of a pair have different lengths, and `align` was not given.
        InvalidSpec: a grid, metric, direction or number of prompts is not valid.
        PointNotArmed: the engine has no tap at a point.
        The errors of `SteerModel.generate`, SteeringNotApplied among them.
    """
    pairs = pairs_of(model.tokenizer, clean, corrupted, direction=direction, align=align)
    places = places_of(model, points)
    runs = Runs(model, metric, len(pairs), concurrent, progress)

    async def given(pair: Pair, place: ResolvedGrid, positions: Sequence[int]) -> Given:
        spec = place.grid.capture([position + pair.shift for position in positions])
        value, source = await runs.read(pair.number, pair.source, spec)
        return Given(value, partial(_beside, source, pair.shift))

    return await over_grids(runs, pairs, places, _positions, given)


def _positions(pair: Pair, grid: Grid) -> list[int]:
    """Return a grid's positions in the changed prompt that have a counterpart in the other prompt.

    Raises:
        InvalidSpec: there is none, or prompts are shifted and rows of a site depend on their positions.
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
    """Return the rows of the other prompt that correspond to a cell."""
    return source.at(cell.point, [position + shift for position in cell.positions])
