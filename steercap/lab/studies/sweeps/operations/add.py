"""Operation that adds a multiple of the vector."""

from __future__ import annotations

from typing import Any

import torch

from steercap.lab.studies.sweeps.operations.base import Operation
from steercap.steering.edits.add import Add
from steercap.steering.edits.base import Edit


class Adding(Operation):
    """Addition; the scale is the multiple of the vector or, with `relative`, the added norm over the row's norm."""

    neutral = 0.0
    axis = "times the vector"
    relative = True

    def edit(self, vector: torch.Tensor, scale: float, *, relative: bool, **scope: Any) -> Edit:
        return Add(vector, scale, relative=relative, **scope)


MEMBER = Adding()
