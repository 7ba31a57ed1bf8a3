"""Addition of a vector to rows, to all or to those that a probe picks.

Contrastive activation addition: Rimsky et al. 2024, arXiv:2312.06681. Conditional steering: Lee et al. 2024,
arXiv:2409.05907.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from steercap.core.program import Response
from steercap.errors import InvalidVector
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


@dataclass(frozen=True, eq=False, repr=False)
class AddIf(Edit):
    """Edit that adds a vector to the rows that a probe picks; each row is decided separately.

    h <- h + scale v where h·probe + bias > threshold, and h unchanged elsewhere.

    Args:
        vector: v, [hidden], in the units of the stream.
        probe: [hidden], used without normalisation, such as the weights of a linear probe.
        threshold: value that the probe must exceed.
        scale: a factor; with `relative` a fraction of the row's own norm.
        bias: the probe's own bias.
        relative: True to scale by the norm of the row; then only the vector's direction counts.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    vector: Vector
    probe: Vector
    threshold: float = 0.0
    scale: float = 1.0
    bias: float = 0.0
    relative: bool = False

    def _check(self) -> None:
        vector, probe = self._keep("vector"), self._keep("probe")
        for number in ("threshold", "scale", "bias"):
            self._number(number)
        if vector.shape != probe.shape:
            raise InvalidVector(f"AddIf: the probe has width {len(probe)}, the vector {len(vector)}; they must agree")
        if not probe.any():
            raise InvalidVector("AddIf: probe is zero, so every row would have the same value")
        self._flag("relative")
        if self.relative:
            unit(self, "vector")

    def lower(self) -> tuple[RankOne, ...]:
        assert isinstance(self.vector, torch.Tensor)
        assert isinstance(self.probe, torch.Tensor)
        write = unit(self, "vector") if self.relative else self.vector[None]
        response = Response(bias=self.bias, offset=self.scale, threshold=self.threshold, relative=self.relative)
        return (RankOne(write, response, self.probe[None]),)


MEMBERS: Final[Mapping[str, type[Edit]]] = {
    "add": Add,
    "add_if": AddIf,
}
