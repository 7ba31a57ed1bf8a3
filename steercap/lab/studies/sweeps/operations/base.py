"""Base class of operations: a vector and a scale give an edit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from jaxtyping import Float

from steercap.steering.edits.base import Edit


class Operation(ABC):
    """Operation of a sweep, such as addition: makes an edit of `steercap.steering.edits` from a vector and a scale.

    Each subclass defines what its scale is: a multiple of the vector, or the share of a projection that is removed.
    """

    #: Scale at which it changes nothing; None if there is none.
    neutral: ClassVar[float | None]
    #: Axis label of the scale.
    axis: ClassVar[str]
    #: True if its scale can be a fraction of the row's norm.
    relative: ClassVar[bool] = False
    #: True if minus the scale has the opposite effect, so that there is a reversed control.
    signed: ClassVar[bool] = True

    @abstractmethod
    def edit(self, vector: Float[torch.Tensor, " hidden"], scale: float, *, relative: bool, **scope: Any) -> Edit:
        """Return the edit of one vector at one scale.

        Args:
            vector: vector, [hidden], in the units of the stream.
            scale: scale, as defined by the operation.
            relative: True if the scale is a fraction of the row's norm; only for operations that allow it.
            scope: `layer`, `site` and `tokens` of the edit.
        """
