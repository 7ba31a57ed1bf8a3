"""Mean and variance of each element, exact; for rows too wide for a covariance, or split over ranks."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float

from steercap.worker.sketches import Kind, SketchState, move_mean


class Variances(Kind):
    """Mean and sum of squared deviations from it: float64 [width] each."""

    whole: ClassVar[bool] = False

    def shapes(self, width: int, size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"mean": ((width,), torch.float64), "scatter": ((width,), torch.float64)}

    def add(self, state: SketchState, block: Float[torch.Tensor, "rows width"]) -> None:
        wide = block.double()
        mean = wide.mean(0)
        shift = move_mean(state, mean, len(block))
        state.tensors["scatter"].add_(wide.sub_(mean).square_().sum(0)).add_(shift.square_())

    def combine(self, state: SketchState, other: SketchState) -> None:
        shift = move_mean(state, other.tensors["mean"], other.rows)
        state.tensors["scatter"].add_(other.tensors["scatter"]).add_(shift.square_())

    def variance(self, state: SketchState) -> Float[torch.Tensor, " width"]:
        return state.tensors["scatter"] / (state.rows - 1)


MEMBER = Variances()
