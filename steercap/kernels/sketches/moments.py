"""Sketches of mean, covariance and variances, exact up to rounding; and of a few rows that approximate all.

A covariance is a compensated sum of float32 products. Each block of rows is centred on its own mean, in float64, before
its products are taken; the blocks are combined by Chan's formula. So no large numbers are subtracted from each other,
whatever the mean. For rows too wide for a covariance, or split over ranks, there is the kind of variances.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

import torch
from jaxtyping import Float

from steercap.errors import InvalidRequest
from steercap.kernels.bits import exact_products
from steercap.kernels.sketches import Kind, SketchState, move_mean, signed

#: Maximum number of bytes of a covariance that are updated at once; temporaries take a few times as much.
PART_BYTES: Final = 64 << 20
#: Bound of the relative rounding error of the float64 sum of all squares.
ALIKE: Final = 1e-9


class Moments(Kind):
    """Mean, float64 [width], and sum of products of deviations from the mean, float32 [2, width, width].

    The second half of the latter has the rounding errors of the first (Neumaier). Deviations below 1e-19 lose bits,
    since their products are denormal in float32.
    """

    #: A quarter of float32's maximum; no element of "scatter" exceeds the sum of all squares.
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
        _check_scatter(state)
        total = state.tensors["scatter"].sum(0, dtype=torch.float64)
        return total.add(total.T).div_(2 * (state.rows - 1))

    def variance(self, state: SketchState) -> Float[torch.Tensor, " width"]:
        _check_scatter(state)
        return state.tensors["scatter"].diagonal(dim1=1, dim2=2).sum(0, dtype=torch.float64) / (state.rows - 1)

    def spectrum(self, state: SketchState) -> tuple[Float[torch.Tensor, " k"], Float[torch.Tensor, "k width"]]:
        values, vectors = torch.linalg.eigh(self.covariance(state))
        return values.flip(0).clamp_(min=0), signed(vectors.T.flip(0))


def _check_scatter(state: SketchState) -> None:
    """Check that the products of deviations have not all underflowed to zero although rows differ.

    Raises:
        InvalidRequest: they have underflowed.
    """
    alike = state.rows * float(state.tensors["mean"].square().sum())
    if state.squares - alike > ALIKE * state.squares and not bool(state.tensors["scatter"].any()):
        raise InvalidRequest(
            "the rows of a moments sketch differ by less than 1e-22, whose products are zero in float32; use the kind "
            "'variances', or larger rows"
        )


def add_compensated(total: torch.Tensor, lost: torch.Tensor, term: torch.Tensor) -> None:
    """Add `term` to `total` in place, and the rounding error to `lost`; all float32 of one shape.

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
    """Return slices of rows of a [width, width] matrix, each of at most `PART_BYTES`."""
    step = max(1, PART_BYTES // (4 * width))
    return (slice(start, start + step) for start in range(0, width, step))


class Variances(Kind):
    """Mean of each element, and sum of squared deviations from the mean: float64 [width] each."""

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


class FrequentDirections(Kind):
    """Sketch matrix of `size` rows with a buffer of as many, float64 [2 size, width]; mean; and total shrinkage.

    The `size` rows B approximate all rows A, with ‖AᵀA - BᵀB‖₂ at most ‖A‖²/size (Frobenius norm). Source: Liberty,
    Simple and deterministic matrix sketching (2013); Ghashami et al., Frequent Directions (2016). The buffer is as long
    as the `size` rows, so that one decomposition serves `size` new rows.

    All tensors are float64: the largest directions of a residual stream are a million times longer than those of
    interest.
    """

    default_size: ClassVar[int | None] = 64

    def shapes(self, width: int, size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "mean": ((width,), torch.float64),
            "rows": ((2 * size, width), torch.float64),
            "lost": ((1,), torch.float64),
        }

    def add(self, state: SketchState, block: Float[torch.Tensor, "rows width"]) -> None:
        wide = block.double()
        move_mean(state, wide.mean(0), len(block))
        self._append(state, wide)

    def combine(self, state: SketchState, other: SketchState) -> None:
        move_mean(state, other.tensors["mean"], other.rows)
        self._append(state, other.tensors["rows"][: other.filled])
        state.tensors["lost"].add_(other.tensors["lost"])

    def _append(self, state: SketchState, rows: torch.Tensor) -> None:
        """Append rows to the buffer, shrinking the sketch whenever the buffer is full."""
        kept = state.tensors["rows"]
        while len(rows):
            if state.filled == len(kept):
                shrunk, lost = shrink(kept, len(kept) // 2)
                state.tensors["lost"].add_(lost)
                state.filled = len(shrunk)
                kept[: len(shrunk)] = shrunk
            fitting, rows = rows[: len(kept) - state.filled], rows[len(kept) - state.filled :]
            kept[state.filled : state.filled + len(fitting)] = fitting
            state.filled += len(fitting)

    def matrix(self, state: SketchState) -> tuple[Float[torch.Tensor, "size width"], float]:
        """Return rows B that approximate all added rows A, float64, and an upper bound of ‖Ax‖² - ‖Bx‖² for ‖x‖ = 1."""
        kept = state.tensors["rows"]
        rows, lost = shrink(kept[: state.filled], len(kept) // 2)
        return rows, float(state.tensors["lost"] + lost)

    def spectrum(self, state: SketchState) -> tuple[Float[torch.Tensor, " k"], Float[torch.Tensor, "k width"]]:
        """Return the spectrum of `(BᵀB - n m mᵀ) / (n - 1)`, with B of `matrix`, n added rows, and their mean m.

        The error of a variance is at most the bound of `matrix` divided by n - 1.
        """
        rows, mean = self.matrix(state)[0], state.tensors["mean"]
        basis, _ = torch.linalg.qr(torch.cat([rows, mean[None]]).T)  # [width, rank]: nothing else is in their span
        inner, centre = rows @ basis, mean @ basis
        products = inner.T @ inner - state.rows * centre[:, None] * centre
        values, vectors = torch.linalg.eigh(products / (state.rows - 1))
        size = min(len(rows), len(values))
        return values.flip(0)[:size].clamp(min=0), signed((basis @ vectors).T.flip(0)[:size])


def shrink(rows: Float[torch.Tensor, "rows width"], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `size` largest principal rows of a matrix, their squared lengths reduced by that of the next one.

    Args:
        rows: the matrix, float64.
        size: number of rows to keep, at least 1.

    Returns:
        The rows, float64 [at most size, width]; and the amount subtracted from each squared length, float64 [].
    """
    if len(rows) <= size:
        return rows, rows.new_zeros(())
    # The decomposition of the small matrix of products; its rounding error is negligible in float64.
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    lost = values[-size - 1].clamp(min=0)
    kept = values[-size:].flip(0)
    scales = torch.where(kept > lost, (kept - lost) / kept, 0).sqrt()
    return scales[:, None] * (vectors[:, -size:].flip(1).T @ rows), lost


#: Kinds of sketch, by name.
MEMBERS: Final[Mapping[str, Kind]] = {
    "moments": Moments(),
    "variances": Variances(),
    "frequent_directions": FrequentDirections(),
}
