"""What is added to a loss so that vectors stay short, or have few elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steercap.errors import InvalidSetting
from steercap.lab.training.trainable import TrainableSpec


@dataclass(frozen=True)
class Penalties:
    """Weights of what is added to a trait's loss, over all that is trained of it.

    Args:
        norm: of the sum of squares.
        sparsity: of the sum of absolute values, whose gradient moves small elements towards zero, to within a step.

    Raises:
        InvalidSetting: a weight below 0.
    """

    norm: float = 0.0
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        if not (self.norm >= 0 and self.sparsity >= 0):
            raise InvalidSetting(f"norm_penalty={self.norm}, sparsity_penalty={self.sparsity}; give 0 or more")

    def of(self, spec: TrainableSpec) -> torch.Tensor:
        """What is added: a number that torch knows the gradient of."""
        values = torch.cat([value.flatten() for value in spec.values.values()])
        return self.norm * values.square().sum() + self.sparsity * values.abs().sum()
