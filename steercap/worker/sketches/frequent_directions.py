"""Frequent Directions: a few rows B approximate all rows A, with ‖AᵀA - BᵀB‖₂ at most ‖A‖²/size (Frobenius).

Source: Liberty, Simple and deterministic matrix sketching (2013); Ghashami et al., Frequent Directions (2016). Behind
the `size` rows is a buffer of equal length, so that one decomposition serves `size` new rows.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float

from steercap.worker.sketches import Kind, SketchState, move_mean, signed


class FrequentDirections(Kind):
    """`size` rows and a buffer behind them, float64 [2 size, width]; the mean; and the total shrinkage.

    All of it is float64: the largest directions of a residual stream are a million times as long as those in question.
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
        """Append rows to the buffer, shrinking it whenever it is full."""
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
        """Return the spectrum of `(BᵀB - n m mᵀ) / (n - 1)`, with B of `matrix`, n rows in all, and m their mean.

        A variance is off by at most the bound of `matrix` over n - 1.
        """
        rows, mean = self.matrix(state)[0], state.tensors["mean"]
        basis, _ = torch.linalg.qr(torch.cat([rows, mean[None]]).T)  # [width, rank]: nothing else is in their span
        inner, centre = rows @ basis, mean @ basis
        products = inner.T @ inner - state.rows * centre[:, None] * centre
        values, vectors = torch.linalg.eigh(products / (state.rows - 1))
        size = min(len(rows), len(values))
        return values.flip(0)[:size].clamp(min=0), signed((basis @ vectors).T.flip(0)[:size])


def shrink(rows: Float[torch.Tensor, "rows width"], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `size` longest principal rows of a matrix, with the squared length of the next one subtracted.

    Args:
        rows: float64.
        size: number of rows to keep, at least 1.

    Returns:
        The rows, float64 [at most size, width], and the amount subtracted from each squared length: float64 [].
    """
    if len(rows) <= size:
        return rows, rows.new_zeros(())
    # The decomposition of the small matrix of products; its rounding error is negligible in float64.
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    lost = values[-size - 1].clamp(min=0)
    kept = values[-size:].flip(0)
    scales = torch.where(kept > lost, (kept - lost) / kept, 0).sqrt()
    return scales[:, None] * (vectors[:, -size:].flip(1).T @ rows), lost


MEMBER = FrequentDirections()
