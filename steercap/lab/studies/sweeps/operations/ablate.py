"""Operation that removes a share of the projection on the vector."""

from __future__ import annotations

from typing import Any

import torch

from steercap.lab.studies.sweeps.operations.base import Operation
from steercap.steering.edits.ablate import Ablate
from steercap.steering.edits.base import Edit


class Ablating(Operation):
    """Ablation; the scale is the share removed, 1 - keep: 1 removes the projection, 0 nothing, and -1 doubles it."""

    neutral = 0.0
    axis = "share of the projection taken out"

    def edit(self, vector: torch.Tensor, scale: float, *, relative: bool, **scope: Any) -> Edit:  # noqa: ARG002 -- it has none
        return Ablate(vector, keep=1 - scale, **scope)


MEMBER = Ablating()
