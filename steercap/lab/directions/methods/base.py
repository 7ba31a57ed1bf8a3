"""Base class of methods: a direction from rows without a property to rows with it.

Shape legend: p, n = rows with the property, and without; hidden = elements of a row. All arithmetic is in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float


class Method(ABC):
    """Method of computing a direction at one layer."""

    #: True if row i of both kinds are a pair, so that there must be as many of each.
    paired: bool = False
    #: Extras that it needs beside steercap's own dependencies.
    extras: tuple[str, ...] = ()

    @abstractmethod
    def direction(
        self, positive: Float[torch.Tensor, "p hidden"], negative: Float[torch.Tensor, "n hidden"], seed: int
    ) -> Float[torch.Tensor, " hidden"]:
        """Return the direction, scaled so that doses mean the same for every method: float64 [hidden].

        Added once, it moves the mean of the negative rows along itself to the projection of the positive rows' mean. It
        is in the units of the stream.

        Args:
            positive, negative: float64 rows.
            seed: seed for methods that draw.
        """


def carrying(
    direction: Float[torch.Tensor, " hidden"],
    positive: Float[torch.Tensor, "p hidden"],
    negative: Float[torch.Tensor, "n hidden"],
) -> Float[torch.Tensor, " hidden"]:
    """Scale a direction of any length and sign as `Method.direction` requires."""
    unit = direction / direction.norm()
    carried: torch.Tensor = unit * (unit @ (positive.mean(0) - negative.mean(0)))
    return carried
