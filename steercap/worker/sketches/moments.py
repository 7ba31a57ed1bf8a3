"""Mean and covariance of whole rows, exact up to rounding: float32 products with a compensated sum.

Each block of rows is centred on its own mean, in float64, before its products are taken; the blocks are combined by
Chan's formula. So no two large numbers are ever subtracted, whatever the mean is, and the terms of the sum are
products of the size of the result. For rows too wide for a covariance, or split over ranks, there are variances: mean
and variance of each element, exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

import torch
from jaxtyping import Float

from steercap.kernels.bits import exact_products
from steercap.worker.sketches import Kind, SketchState, move_mean, signed

#: Bytes of the part of a covariance that is updated at once; temporaries take a few times as much.
PART_BYTES: Final = 64 << 20


class Moments(Kind):
    """Mean, float64 [width], and sum of products of deviations from it, float32 [2, width, width].

    The second half of the latter holds the rounding errors of the first (Neumaier).
    """

    #: No element of the sum exceeds the sum of all squares.
    most_squares: ClassVar[float] = torch.finfo(torch.float32).max / 4

    def shapes(self, width: int, size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"mean": ((width,), torch.float64), "scatter": ((2, width, width), torch.float32)}

    def add(self, state: SketchState, block: Float[torch.Tensor, "rows width"]) -> None:
        wide = block.double()
        mean = wide.mean(0)
        shift = move_mean(state, mean, len(block))
        deviations = torch.cat([wide.sub_(mean), shift[None]]).float()
        total, lost = state.tensors["scatter"]
        with exact_products():
            for part in _parts(len(shift)):
                add_compensated(total[part], lost[part], deviations[:, part].T @ deviations)

    def combine(self, state: SketchState, other: SketchState) -> None:
        shift = move_mean(state, other.tensors["mean"], other.rows).float()
        total, lost = state.tensors["scatter"]
        for part in _parts(len(shift)):
            add_compensated(total[part], lost[part], shift[part, None] * shift)
            add_compensated(total[part], lost[part], other.tensors["scatter"][0, part])
            lost[part] += other.tensors["scatter"][1, part]

    def covariance(self, state: SketchState) -> Float[torch.Tensor, "width width"]:
        total = state.tensors["scatter"].sum(0, dtype=torch.float64)
        return total.add(total.T).div_(2 * (state.rows - 1))

    def variance(self, state: SketchState) -> Float[torch.Tensor, " width"]:
        return state.tensors["scatter"].diagonal(dim1=1, dim2=2).sum(0, dtype=torch.float64) / (state.rows - 1)

    def spectrum(self, state: SketchState) -> tuple[Float[torch.Tensor, " k"], Float[torch.Tensor, "k width"]]:
        values, vectors = torch.linalg.eigh(self.covariance(state))
        return values.flip(0).clamp_(min=0), signed(vectors.T.flip(0))


def add_compensated(total: torch.Tensor, lost: torch.Tensor, term: torch.Tensor) -> None:
    """Add `term` to `total` in place, and the rounding error to `lost`: float32, of one shape; `term` is unchanged.

    Source: Knuth, The Art of Computer Programming 2, 4.2.2, theorem B.
    """
    before = total.clone()
    total += term
    added = total - before
    missing = term - added  # of the term ...
    added.neg_().add_(total)
    before -= added  # ... and of the sum
    lost += missing.add_(before)


def _parts(width: int) -> Iterator[slice]:
    """Return slices of rows of a covariance to update one after another."""
    step = max(1, PART_BYTES // (4 * width))
    return (slice(start, start + step) for start in range(0, width, step))


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


#: By name.
MEMBERS: Final[Mapping[str, Kind]] = {
    "moments": Moments(),
    "variances": Variances(),
}
