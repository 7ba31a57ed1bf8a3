"""Patch one run's rows into another, a place at a time: what of the answer comes back, or breaks (arXiv:2202.05262)."""

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
from steercap.lab.mechanism.patching.points import Cell, Grid, Places, places_of, positions_of
from steercap.lab.mechanism.patching.results import Effects
from steercap.lab.mechanism.patching.running import CONCURRENT, Runs, Source

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
    """Put rows of one run into another, at each place of a grid in a run of its own, and measure what it does.

    All runs of all pairs share the engine's batches. The rows that are put in are those that the other run was seen to
    have, to the bit; a run in which a row was not put in raises.

    Args:
        model: an open model, its `sites` armed where the grid lies.
        clean, corrupted: a prompt each, or a list of as many of each: str, token ids, or `Exchange`. The prompts of a
            pair must have equally many tokens, unless `align` says otherwise.
        points: where: a `Grid`, or several.
        metric: the number that runs are compared by: `LogitDifference`, `LogProbability`, `Measured`, or your own.
        direction: "denoise" puts clean rows into the corrupted run: what suffices to bring the answer back. "noise"
            puts corrupted rows into the clean run: what is needed for it.
        align: "end" lays prompts of different lengths beside each other by their last tokens; tokens of the run that
            is changed with none beside them are left out. Not for `q` and `k`, which hold their positions.
        concurrent: runs under way at once.
        progress: called with the number of patched runs that are done, and of all.

    Returns:
        The effect of every place, in each pair.

    Raises:
        InvalidPrompt: the prompts of a pair have different lengths, and `align` was not given.
        InvalidSpec: a grid, metric, direction or number of prompts that does not fit.
        PointNotArmed: the engine has no tap there.
        The errors of `SteerModel.generate`, SteeringNotApplied among them.
    """
    pairs = pairs_of(model.tokenizer, clean, corrupted, direction=direction, align=align)
    places = places_of(model, points)
    runs = Runs(model, metric, len(pairs), concurrent, progress)

    async def given(pair: Pair, place: Places, positions: Sequence[int]) -> Given:
        spec = place.grid.capture([position + pair.shift for position in positions])
        value, source = await runs.read(pair.number, pair.source, spec)
        return Given(value, partial(_beside, source, pair.shift))

    return await over_grids(runs, pairs, places, _positions, given)


def _positions(pair: Pair, grid: Grid) -> list[int]:
    """The positions of a grid in the prompt that is changed, of those that have one of the other prompt beside them.

    Raises:
        InvalidSpec: none, or rows of another position where rows hold theirs.
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


def _beside(source: Source, shift: int, cell: Cell) -> torch.Tensor:
    """The rows of the other prompt beside a cell."""
    return source.at(cell.point, [position + shift for position in cell.positions])
