"""Bound the projection on the vector from above."""

from __future__ import annotations

from typing import Any

import torch

from steercap.edits.base import Edit
from steercap.edits.cap import Cap
from steercap.experiments.operations.base import Operation


class Capping(Operation):
    """The scale is the greatest projection on the unit vector, in the units of the stream; no scale is neutral."""

    neutral = None
    axis = "greatest projection"

    def edit(self, vector: torch.Tensor, scale: float, *, relative: bool, **scope: Any) -> Edit:  # noqa: ARG002 -- it has none
        return Cap(vector, high=scale, **scope)


MEMBER = Capping()
