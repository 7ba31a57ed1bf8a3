"""What a method is: rows that show something and rows that do not, and a direction from these to those.

Shape legend: p, n = rows that show it, and that do not; hidden = elements of a row. All arithmetic is in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float


class Method(ABC):
    """How a direction is found at one layer."""

    #: Whether row i of both kinds belong together, so that there must be as many of each.
    paired: bool = False
    #: What it needs beside steercap's own dependencies.
    extras: tuple[str, ...] = ()

    @abstractmethod
    def direction(
        self, positive: Float[torch.Tensor, "p hidden"], negative: Float[torch.Tensor, "n hidden"], seed: int
    ) -> Float[torch.Tensor, " hidden"]:
        """The vector that, added once, carries the mean of the negative rows as far along itself as the positive
        ones' mean lies: float64 [hidden], in the units of the stream. So doses mean the same whatever the method.

        Args:
            positive, negative: float64 rows.
            seed: for methods that draw.
        """


def carrying(
    direction: Float[torch.Tensor, " hidden"],
    positive: Float[torch.Tensor, "p hidden"],
    negative: Float[torch.Tensor, "n hidden"],
) -> Float[torch.Tensor, " hidden"]:
    """A direction of any length and sign, at the length and sign that `Method.direction` asks for."""
    unit = direction / direction.norm()
    carried: torch.Tensor = unit * (unit @ (positive.mean(0) - negative.mean(0)))
    return carried
