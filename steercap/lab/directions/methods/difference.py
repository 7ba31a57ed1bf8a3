"""Difference of means, as in contrastive activation addition and persona vectors."""

from __future__ import annotations

import torch

from steercap.lab.directions.methods.base import Method


class Difference(Method):
    """mean(positive) - mean(negative).

    Source: Rimsky et al., Steering Llama 2 via Contrastive Activation Addition; Chen et al., Persona Vectors.
    """

    def direction(self, positive: torch.Tensor, negative: torch.Tensor, seed: int) -> torch.Tensor:  # noqa: ARG002 -- nothing is drawn
        return positive.mean(0) - negative.mean(0)


MEMBER = Difference()
