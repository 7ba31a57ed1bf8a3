"""How close two sets of rows are, by their worst row: a mean over tokens hides the one that is wrong."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float


class Parity(NamedTuple):
    """The worst row.

    Args:
        cosine: least cosine of a row with its reference.
        error: greatest absolute error of a row, over the norm of its reference row.
    """

    cosine: float
    error: float

    def worse(self, other: Parity) -> Parity:
        """The worse of both, each measure by itself."""
        return Parity(min(self.cosine, other.cosine), max(self.error, other.error))


#: Nothing compared yet.
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
