"""Comparison of two sets of rows by their worst row, since a mean over tokens hides a single wrong one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float


class Parity(NamedTuple):
    """Agreement of the worst row with its reference.

    Args:
        cosine: least cosine of any row with its reference.
        error: greatest absolute error of any row, over the norm of its reference row.
    """

    cosine: float
    error: float

    def worse(self, other: Parity) -> Parity:
        """Return the worse of both, each measure by itself."""
        return Parity(min(self.cosine, other.cosine), max(self.error, other.error))


#: Initial value before any comparison.
PERFECT = Parity(1.0, 0.0)


def compare_rows(rows: Float[torch.Tensor, "rows hidden"], reference: Float[torch.Tensor, "rows hidden"]) -> Parity:
    """Compare rows with their reference, in float64.

    Raises:
        ValueError: the shapes differ, or there is no row.
    """
    if rows.shape != reference.shape or not len(rows):
        raise ValueError(f"cannot compare rows {tuple(rows.shape)} with a reference of {tuple(reference.shape)}")
    left, right = rows.double(), reference.double()
    cosine = torch.cosine_similarity(left, right, dim=-1).min()
    error = ((left - right).abs().amax(-1) / right.norm(dim=-1)).max()
    return Parity(float(cosine), float(error))
