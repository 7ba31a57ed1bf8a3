"""Loop over every cell of some grids in every pair of prompts, shared by patching and ablation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import torch

from steercap.lab.mechanism.patching.pairs import Pair
from steercap.lab.mechanism.patching.points import Grid, PatchedPlace, ResolvedGrid
from steercap.lab.mechanism.patching.results import Effects, PatchEffect, effect_of
from steercap.lab.mechanism.patching.running import Runs, replaced
from steercap.steering.spec import SteeringSpec


class Given(NamedTuple):
    """Rows to put into the cells of one grid in one pair.

    Args:
        value: metric of the run that rows come from; None if they come from no run.
        rows: function that returns a flat row for each position of a cell.
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
    """Put rows into every cell, in a run of its own.

    Args:
        runs: runner of the experiment.
        pairs: the prompts.
        places: the grids.
        positions: function that returns the positions of a grid's tokens in the changed prompt of a pair.
        given: function that returns the rows to put there; called at the pair's turn, and held until its runs are done.

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
            return effect_of(pair, cell, value=found, base=base, source=value)

        return await runs.each_change(place.cells(at), one_cell)

    async def one_pair(asked: tuple[Pair, list[tuple[ResolvedGrid, Sequence[int]]]]) -> list[PatchEffect]:
        pair, each = asked
        base = await runs.value(pair.number, pair.base)
        return [effect for place, at in each for effect in await one_grid(pair, place, at, base)]

    found = await runs.each_pair(asked, one_pair)
    return Effects([effect for effects in found for effect in effects], [pair.tokens for pair in pairs])
