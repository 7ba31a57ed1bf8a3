"""Set one feature of a sparse autoencoder (Templeton et al. 2024, "Scaling Monosemanticity", feature steering)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steercap.core.program import Response
from steercap.edits.base import Edit, RankOne, Vector
from steercap.errors import InvalidVector


@dataclass(frozen=True, eq=False, repr=False)
class SAEFeature(Edit):
    """h <- h + (value - relu(h·encoder + bias)) decoder: the feature becomes `value`; what it does not explain stays.

    Args:
        encoder: the feature's encoder weights, [hidden], used as they are.
        decoder: its decoder weights, [hidden], used as they are.
        value: its activation afterwards; 0 switches it off.
        bias: its encoder bias.
        decoder_bias: [hidden]; what the SAE subtracts from a row before encoding it, if it does.
        layer, layers, site, tokens, part: see `Edit`.
    """

    encoder: Vector
    decoder: Vector
    value: float
    bias: float = 0.0
    decoder_bias: Vector | None = None

    def _check(self) -> None:
        kept = [self._keep("encoder"), self._keep("decoder")]
        if self.decoder_bias is not None:
            kept.append(self._keep("decoder_bias"))
        for number in ("value", "bias"):
            self._number(number)
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
            bias -= float(self.encoder.double() @ self.decoder_bias.double())
        response = Response(bias=bias, offset=self.value, minus=1.0, floor=0.0)
        return (RankOne(self.decoder[None], response, self.encoder[None]),)


MEMBER = SAEFeature
