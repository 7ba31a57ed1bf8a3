"""Operation that sets the projection on the vector to a value."""

from __future__ import annotations

from typing import Any

import torch

from steercap.lab.studies.sweeps.operations.base import Operation
from steercap.steering.edits.base import Edit
from steercap.steering.edits.set_projection import SetProjection


class Setting(Operation):
    """Set projection; the scale is the projection on the unit vector, in the units of the stream; none is neutral.

    Another sign is another value, not the reverse, so there is no reversed control. The vector's length does not count,
    so random vectors of the same norm are random directions: the change of a row depends on the row.
    """

    neutral = None
    axis = "projection"
    signed = False

    def edit(self, vector: torch.Tensor, scale: float, *, relative: bool, **scope: Any) -> Edit:  # noqa: ARG002 -- it has none
        return SetProjection(vector, scale, **scope)


MEMBER = Setting()
