"""Addition of a vector to rows: contrastive activation addition (Rimsky et al. 2024, arXiv:2312.06681)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steercap.core.program import Response
from steercap.steering.edits import Edit, RankOne, Vector, unit


@dataclass(frozen=True, eq=False, repr=False)
class Add(Edit):
    """Edit that adds a vector to rows: h <- h + scale v, or with `relative` h <- h + scale ‖h‖ v/‖v‖.

    Args:
        vector: v, [hidden], in the units of the stream.
        scale: a factor; with `relative` a fraction of the row's own norm. Any finite number, 0 changes nothing.
        relative: True to scale by the norm of the row at that moment; then only the vector's direction counts.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    vector: Vector
    scale: float = 1.0
    relative: bool = False

    def _check(self) -> None:
        self._keep("vector")
        self._number("scale")
        self._flag("relative")
        if self.relative:
            unit(self, "vector")

    def lower(self) -> tuple[RankOne, ...]:
        assert isinstance(self.vector, torch.Tensor)
        write = unit(self, "vector") if self.relative else self.vector[None]
        return (RankOne(write, Response(offset=self.scale, relative=self.relative)),)


MEMBER = Add
