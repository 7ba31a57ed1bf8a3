"""Sketches of whole engines against the rows themselves, which the same requests hand over beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from steercap.captures.handle import CaptureHandle
from steercap.captures.sketch import Sketch
from steercap.captures.stacking import flat
from steercap.core.spec import CaptureSpec, Point
from steercap.kernels.sketches import BLOCK
from support.rows import GREEDY, random_prompt

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: The most that a block's products can be off by in float32, over the deviations of the two elements: each of BLOCK + 1
#: additions, and three roundings of a product, by half a unit (Higham, Accuracy and Stability, 3.5).
ROUNDING: Final = (BLOCK + 4) * 2.0**-24
NINE: Final[dict[str, Any]] = {"max_tokens": 9, **GREEDY}


def rows_by_point(handles: Sequence[CaptureHandle]) -> dict[Point, torch.Tensor]:
    """The rows of fetched handles, one after the other: float64 [rows, width] by point."""
    points = handles[0].points
    return {point: torch.cat([one.captures[point].flatten(1) for one in handles]).double() for point in points}


def moments_hold(found: Sketch, rows: Mapping[Point, torch.Tensor], within: float = ROUNDING) -> float:
    """Assert that mean and covariance are those of rows, float64; returns the greatest difference of a covariance.

    Args:
        found: what the workers added up.
        rows: by point, float64 [rows, width].
        within: bound of the differences, over the deviations of the elements.
    """
    greatest = 0.0
    for point in found.points:
        assert found.rows == len(rows[point])
        spread = rows[point].std(0)
        mean, covariance = found.mean(*point) - rows[point].mean(0), found.covariance(*point) - torch.cov(rows[point].T)
        assert bool((mean.abs() <= within * spread).all()), f"the mean at {point} is not that of the rows"
        differences = covariance.abs() / torch.outer(spread, spread)
        greatest = np.maximum(greatest, float(differences.max()))
    assert greatest <= within, greatest
    return greatest


def directions_hold(found: Sketch, rows: Mapping[Point, torch.Tensor]) -> None:
    """Assert that frequent directions keep their bound."""
    for point in found.points:
        short, bound = found.frequent_directions(*point)
        squares = float(rows[point].square().sum())
        eigenvalues = torch.linalg.eigvalsh(rows[point].T @ rows[point] - short.T @ short)
        assert float(eigenvalues.abs().max()) <= bound + 1e-9 * squares
        assert bound <= squares / found.size


async def sketches_agree(model: SteerModel) -> float:
    """Moments and frequent directions of requests that come at once, at all points of the residual stream; returns the
    greatest difference of a covariance, over the deviations of its elements.
    """
    prompts = [random_prompt(3 + 11 * number, number) for number in range(12)]
    async with (
        model.sketch("moments") as moments,
        model.sketch("frequent_directions", layers=[1, -1], size=16) as short,
    ):
        _, handles = await model.generate(prompts, NINE, capture=CaptureSpec())
        found, directions = await moments.fetch(), await short.fetch()
        assert (moments.requests, short.requests) == (12, 12)
    await model.fetch_captures_batch(handles)
    rows = rows_by_point(flat(handles))
    directions_hold(directions, rows)
    return moments_hold(found, rows)
