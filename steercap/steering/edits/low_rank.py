"""Affine change of low rank: representation fine-tuning (Wu et al. 2024, arXiv:2404.03592)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from steercap.core.program import Response
from steercap.errors import InvalidEdit, InvalidVector
from steercap.steering.edits import Edit, RankOne, Vector, number_in

MAX_RANK: Final = 16


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Edit):
    """Edit that adds a low-rank affine function of the row: h <- h + scale Wᵀ(U h + b).

    All k projections are read from the same row. LoReFT's `h + Rᵀ(W h + b - R h)` is
    `LowRank(read=W - R, write=R, bias=b)`.

    Args:
        read: U, [k, hidden], k at most 16.
        write: W, [k, hidden].
        bias: b, [k], or None for zeros.
        scale: a factor on the whole change.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    read: Vector
    write: Vector
    bias: Vector | None = None
    scale: float = 1.0

    def _check(self) -> None:
        read, write = self._keep("read", "k width"), self._keep("write", "k width")
        if self.bias is None:
            object.__setattr__(self, "bias", torch.zeros(len(read)))
        bias = self._keep("bias", "k")
        self._number("scale")
        if read.shape != write.shape:
            raise InvalidVector(f"LowRank: read is {tuple(read.shape)}, write {tuple(write.shape)}; they must agree")
        if len(bias) != len(read):
            raise InvalidVector(f"LowRank: bias has {len(bias)} values for rank {len(read)}")
        if len(read) > MAX_RANK:
            raise InvalidEdit(f"LowRank: rank {len(read)} is above {MAX_RANK}; give two edits, or a lower rank")

    def lower(self) -> tuple[RankOne, ...]:
        read, write, bias = self.read, self.write, self.bias
        assert isinstance(read, torch.Tensor)
        assert isinstance(write, torch.Tensor)
        assert isinstance(bias, torch.Tensor)
        return tuple(
            RankOne(
                write[part, None],
                Response(bias=number_in(bias[part]), gain=self.scale),
                read[part, None],
                joined=part > 0,
            )
            for part in range(len(read))
        )


MEMBER = LowRank
