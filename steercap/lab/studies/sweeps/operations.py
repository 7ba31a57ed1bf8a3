"""Operations that a sweep can scale: each makes an edit of a vector and a scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Float

from steercap.core.registry import Registry
from steercap.steering.edits import Edit
from steercap.steering.edits.ablate import Ablate
from steercap.steering.edits.add import Add
from steercap.steering.edits.cap import Cap
from steercap.steering.edits.set_projection import SetProjection


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


class Adding(Operation):
    """Addition; the scale is the multiple of the vector or, with `relative`, the added norm over the row's norm."""

    neutral = 0.0
    axis = "times the vector"
    relative = True

    def edit(self, vector: torch.Tensor, scale: float, *, relative: bool, **scope: Any) -> Edit:
        return Add(vector, scale, relative=relative, **scope)


class Ablating(Operation):
    """Ablation; the scale is the share removed, 1 - keep: 1 removes the projection, 0 nothing, and -1 doubles it."""

    neutral = 0.0
    axis = "share of the projection taken out"

    def edit(self, vector: torch.Tensor, scale: float, *, relative: bool, **scope: Any) -> Edit:  # noqa: ARG002 -- it has none
        return Ablate(vector, keep=1 - scale, **scope)


class CappingAt(Operation):
    """Cap; the scale is the greatest projection on the unit vector, in the units of the stream; no scale is neutral.

    Another sign is another bound, not the reverse, so there is no reversed control. The vector's length does not count,
    so random vectors of the same norm are random directions: the change of a row depends on the row.
    """

    neutral = None
    axis = "greatest projection"
    signed = False

    def edit(self, vector: torch.Tensor, scale: float, *, relative: bool, **scope: Any) -> Edit:  # noqa: ARG002 -- it has none
        return Cap(vector, high=scale, **scope)


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


OPERATIONS: Final[Registry[Operation]] = Registry(
    "operation",
    {
        "ablate": Ablating(),
        "add": Adding(),
        "cap": CappingAt(),
        "set_projection": Setting(),
    },
)
