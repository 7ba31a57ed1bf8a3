"""Penalties added to a loss, to keep vectors short or sparse."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steercap.errors import InvalidSetting
from steercap.lab.training.trainable import TrainableSpec


@dataclass(frozen=True)
class Penalties:
    """Weights of the penalties on a trait's trained parameters.

    Args:
        norm: weight of the sum of squares.
        sparsity: weight of the sum of absolute values, whose gradient moves small elements towards zero, to within a
            step.

    Raises:
        InvalidSetting: a weight is below 0.
    """

    norm: float = 0.0
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        if not (self.norm >= 0 and self.sparsity >= 0):
            raise InvalidSetting(f"norm_penalty={self.norm}, sparsity_penalty={self.sparsity}; give 0 or more")

    def of(self, spec: TrainableSpec) -> torch.Tensor:
        """Return the penalty, differentiable by torch."""
        values = torch.cat([value.flatten() for value in spec.values.values()])
        return self.norm * values.square().sum() + self.sparsity * values.abs().sum()
