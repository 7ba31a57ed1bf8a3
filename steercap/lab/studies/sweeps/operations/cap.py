"""Operation that bounds the projection on the vector from above."""

from __future__ import annotations

from typing import Any

import torch

from steercap.lab.studies.sweeps.operations.base import Operation
from steercap.steering.edits.base import Edit
from steercap.steering.edits.cap import Cap


class Capping(Operation):
    """Cap; the scale is the greatest projection on the unit vector, in the units of the stream; no scale is neutral.

    Another sign is another bound, not the reverse, so there is no reversed control. The vector's length does not count,
    so random vectors of the same norm are random directions: the change of a row depends on the row.
    """

    neutral = None
    axis = "greatest projection"
    signed = False

    def edit(self, vector: torch.Tensor, scale: float, *, relative: bool, **scope: Any) -> Edit:  # noqa: ARG002 -- it has none
        return Cap(vector, high=scale, **scope)


MEMBER = Capping()
