"""The tap operator, `steercap::tap`, which edits the steered rows of one point and copies the captured ones.

`steercap::tap_norm` also computes the residual sum and RMSNorm that often follow a tap of the stream, in the same
kernel.

Its arguments are tensors and constants, so that every layer traces to the same code. What it does is read from the
step's tables at fixed addresses, never decided by Python code, which a compiled or replayed graph would skip. It is
declared to mutate `hidden` and `residual`, so the compiler does not eliminate it as dead code.

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
    """Implementation of the taps of a worker process, with the tables that they read."""

    def on_tap(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: Int[torch.Tensor, " 1"],
        kind: int,
    ) -> None:
        """Edit and copy the rows of one point of the running pass; arguments as of `tap`."""

    def on_tap_norm(  # noqa: PLR0917 -- as the operator
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"],
        weight: Float[torch.Tensor, " width"],
        point: Int[torch.Tensor, " 1"],
        epsilon: float,
        kind: int,
    ) -> None:
        """Do as `on_tap`, then apply `kernels.reference.add_norm` to all rows; arguments as of `tap_norm`."""


_bound: Tappable | None = None


def bind(tables: Tappable | None) -> None:
    """Set the implementation of this process's taps; None makes taps do nothing."""
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
    """Edit the steered rows of one point in place, and copy the captured rows to the step's buffers.

    Args:
        hidden: the rows, or one summand of them; edited in place.
        residual: the other summand, set to zero in edited rows; None if `hidden` has the whole rows.
        point: index of the point among this rank's points, int32 [1], on the model's device.
        kind: index of the rows' kind (shape, dtype and shards) among those of this rank; equal for all layers of a
            site, so that they trace to the same code.
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
    """Do as `tap`, then add and norm all rows as `kernels.reference.add_norm` does; on CUDA in a single kernel.

    Args:
        hidden, residual: summands of the rows, as for `tap`; `residual` becomes their sum, `hidden` its RMSNorm.
        weight: the RMSNorm's weights, of the stream's dtype.
        point, kind: as for `tap`.
        epsilon: number that the norm adds to the mean square.
    """
    torch.ops.steercap.tap_norm(hidden, residual, weight, point, epsilon, kind)
