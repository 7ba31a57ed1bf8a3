"""The tap operator, `steercap::tap`: at one point, edit the rows that are steered and copy those that are kept.

`steercap::tap_norm` also adds and norms the rows, as the operator after a tap of the stream often does: one kernel then
does what two did.

The operator takes tensors only, so that every layer traces to the same code; its effect is decided by the step's
tables, whose addresses never change, never by Python that a compiled or replayed graph would skip. It declares that it
mutates `hidden` and `residual`, as edits do, so the compiler never eliminates it as dead code.

Shape legend: n = tokens of the pass, padding included; width = elements of a row at the point, or of the rank's shard.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from jaxtyping import Float, Int

from steercap.kernels.reference import add_norm

LIBRARY: Final = torch.library.Library("steercap", "FRAGMENT")
LIBRARY.define("tap(Tensor(a!) hidden, Tensor(b!)? residual, Tensor point, int kind) -> ()")
LIBRARY.define(
    "tap_norm(Tensor(a!) hidden, Tensor(b!) residual, Tensor weight, Tensor point, float epsilon, int kind) -> ()"
)


class Tappable(Protocol):
    """Tables that the taps of a worker process use."""

    def on_tap(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: Int[torch.Tensor, " 1"],
        kind: int,
    ) -> None:
        """Read and edit the rows of one point of the running pass."""

    def on_tap_norm(  # noqa: PLR0917 -- as the operator
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"],
        weight: Float[torch.Tensor, " width"],
        point: Int[torch.Tensor, " 1"],
        epsilon: float,
        kind: int,
    ) -> None:
        """Do as `on_tap`, then as `kernels.reference.add_norm` with all rows."""


_bound: Tappable | None = None


def bind(tables: Tappable | None) -> None:
    """Set the tables that the taps of this process use; None makes the taps idle."""
    global _bound  # noqa: PLW0603 -- a compiled graph calls the operator with tensors alone
    _bound = tables


def _tap(hidden: torch.Tensor, residual: torch.Tensor | None, point: torch.Tensor, kind: int) -> None:
    if _bound is not None:
        _bound.on_tap(hidden, residual, point, kind)


def _tap_norm(  # noqa: PLR0917 -- as the operator
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    point: torch.Tensor,
    epsilon: float,
    kind: int,
) -> None:
    if _bound is None:
        add_norm(hidden, residual, weight, epsilon)
    else:
        _bound.on_tap_norm(hidden, residual, weight, point, epsilon, kind)


def _fake(*_arguments: object) -> None:
    """Return None, as `tap` and `tap_norm` do; used when they are traced."""


for _name, _function in {"tap": _tap, "tap_norm": _tap_norm}.items():
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _function, _device)
    torch.library.register_fake(f"steercap::{_name}", _fake, lib=LIBRARY)


def tap(
    hidden: Float[torch.Tensor, "n width"],
    residual: Float[torch.Tensor, "n width"] | None,
    point: Int[torch.Tensor, " 1"],
    kind: int,
) -> None:
    """Edit the steered rows of one point in place, and copy the captured rows to the buffers of the step.

    Args:
        hidden: the rows, or one summand of them; edits change it in place.
        residual: the other summand, set to zero in an edited row; None when `hidden` is the rows.
        point: index of the point, int32 [1], on the model's device.
        kind: number of the kind of its rows: the same for all layers of a site, or the site's layers would
            not trace to the same code.
    """
    torch.ops.steercap.tap(hidden, residual, point, kind)


def tap_norm(  # noqa: PLR0917 -- as the operator
    hidden: Float[torch.Tensor, "n width"],
    residual: Float[torch.Tensor, "n width"],
    weight: Float[torch.Tensor, " width"],
    point: Int[torch.Tensor, " 1"],
    epsilon: float,
    kind: int,
) -> None:
    """Do as `tap`, then as `kernels.reference.add_norm`; on CUDA in a single kernel.

    Args:
        hidden, residual: summands of the rows, as for `tap`; `residual` becomes their sum, `hidden` its RMSNorm.
        weight: the norm's weights, of the stream's dtype.
        point, kind: as for `tap`.
        epsilon: number that the norm adds to the mean of the squares.
    """
    torch.ops.steercap.tap_norm(hidden, residual, weight, point, epsilon, kind)
