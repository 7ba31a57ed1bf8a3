"""What a sweep needs of an operation: the edit that belongs to a vector and a scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from jaxtyping import Float

from steercap.steering.edits.base import Edit


class Operation(ABC):
    """An operation of `steercap.steering.edits` with one number that is swept: its scale."""

    #: The scale at which it changes nothing; None if there is none.
    neutral: ClassVar[float | None]
    #: What the scale counts, on an axis.
    axis: ClassVar[str]
    #: Whether its scale can be a fraction of the row's norm.
    relative: ClassVar[bool] = False
    #: Whether minus the scale is the opposite of what the scale does, so that there is a reversed control.
    signed: ClassVar[bool] = True

    @abstractmethod
    def edit(self, vector: Float[torch.Tensor, " hidden"], scale: float, *, relative: bool, **scope: Any) -> Edit:
        """The edit of one vector at one scale.

        Args:
            vector: [hidden], in the units of the stream.
            scale: what it means is the operation's to say.
            relative: whether the scale is a fraction of the row's norm; only where the operation can.
            scope: `layer`, `site` and `tokens` of the edit.
        """
