"""Edits that add to rows: a vector, to all rows or to those that a probe selects; or a function of the row itself.

Contrastive activation addition: Rimsky et al. 2024, arXiv:2312.06681. Conditional steering: Lee et al. 2024,
arXiv:2409.05907. Representation fine-tuning: Wu et al. 2024, arXiv:2404.03592. Feature steering: Templeton et al. 2024,
"Scaling Monosemanticity".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Final

import torch

from steercap.core.hints import dataclass
from steercap.core.program import Response
from steercap.errors import InvalidEdit, InvalidVector
from steercap.steering.edits import Edit, RankOne, Vector, number_in, unit


@dataclass(frozen=True, eq=False, repr=False)
class Add(Edit):
    """Edit that adds a vector to each row h: h <- h + scale v, or with `relative` h <- h + scale ‖h‖ v/‖v‖.

    Args:
        vector: v, [hidden], in the units of the stream.
        scale: factor of the vector; with `relative` a fraction of the row's norm. Any finite number, 0 changes nothing.
        relative: True to scale by the norm of the row as preceding edits left it; only the vector's direction counts.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    vector: Vector
    scale: float = 1.0
    _: KW_ONLY
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
    """Edit that adds a vector to the rows at which a linear probe exceeds a threshold, row by row.

    h <- h + scale v where h·probe + bias > threshold, and h unchanged elsewhere.

    Args:
        vector: v, [hidden], in the units of the stream.
        probe: [hidden], used without normalisation, such as the weights of a linear probe.
        threshold: value that the probe must exceed.
        scale: factor of the vector; with `relative` a fraction of the row's norm.
        bias: bias of the probe.
        relative: True to scale by the norm of the row; then only the vector's direction counts.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    vector: Vector
    probe: Vector
    _: KW_ONLY
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


MAX_RANK: Final = 16


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Edit):
    """Edit that adds a low-rank affine function of each row h: h <- h + scale Wᵀ(U h + b).

    All k projections are of the same row. LoReFT's `h + Rᵀ(W h + b - R h)` is
    `LowRank(read=W - R, write=R, bias=b)`.

    Args:
        read: U, [k, hidden], k at most 16.
        write: W, [k, hidden].
        bias: b, [k], or None for zeros.
        scale: factor of the whole change.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    read: Vector
    write: Vector
    _: KW_ONLY
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


@dataclass(frozen=True, eq=False, repr=False)
class SAEFeature(Edit):
    """Edit that sets one SAE feature to `value`; the part of the row that the feature does not explain stays.

    h <- h + (value - f(h·encoder + bias)) decoder. f(p) is p above `threshold`, else 0: relu, or with a threshold
    jumprelu.

    Args:
        encoder: the feature's encoder weights, [hidden], used as they are.
        decoder: the feature's decoder weights, [hidden], used as they are.
        value: activation of the feature after the edit; 0 switches it off.
        bias: the feature's encoder bias.
        decoder_bias: [hidden]; the bias that the SAE subtracts from a row before encoding it, or None.
        threshold: threshold of a jumprelu SAE, 0 or above.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    encoder: Vector
    decoder: Vector
    value: float
    _: KW_ONLY
    bias: float = 0.0
    decoder_bias: Vector | None = None
    threshold: float = 0.0

    def _check(self) -> None:
        kept = [self._keep("encoder"), self._keep("decoder")]
        if self.decoder_bias is not None:
            kept.append(self._keep("decoder_bias"))
        for number in ("value", "bias", "threshold"):
            self._number(number)
        if self.threshold < 0:
            raise InvalidEdit(
                f"SAEFeature: threshold={self.threshold}; activations are never below 0, so give 0 or more"
            )
        if len({vector.shape for vector in kept}) > 1:
            widths = [len(vector) for vector in kept]
            raise InvalidVector(f"SAEFeature: encoder, decoder and decoder_bias have widths {widths}; they must agree")
        for field, vector in zip(("encoder", "decoder"), kept, strict=False):
            if not vector.any():
                raise InvalidVector(f"SAEFeature: {field} is zero, so the feature could not be read or written")

    def lower(self) -> tuple[RankOne, ...]:
        assert isinstance(self.encoder, torch.Tensor)
        assert isinstance(self.decoder, torch.Tensor)
        bias = self.bias
        if isinstance(self.decoder_bias, torch.Tensor):
            bias = bias - number_in(self.encoder.double() @ self.decoder_bias.double())
        if not self.threshold:
            response = Response(bias=bias, offset=self.value, minus=1.0, floor=0.0)
            return (RankOne(self.decoder[None], response, self.encoder[None]),)
        # The feature's activation is subtracted where it is active, and `value` is added everywhere.
        taken = RankOne(
            self.decoder[None], Response(bias=bias, minus=1.0, threshold=self.threshold), self.encoder[None]
        )
        return taken, RankOne(self.decoder[None], Response(offset=self.value))


MEMBERS: Final[Mapping[str, type[Edit]]] = {
    "add": Add,
    "add_if": AddIf,
    "low_rank": LowRank,
    "sae_feature": SAEFeature,
}
