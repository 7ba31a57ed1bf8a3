"""Setting of a sparse autoencoder's feature (Templeton et al. 2024, "Scaling Monosemanticity", feature steering)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steercap.core.program import Response
from steercap.errors import InvalidEdit, InvalidVector
from steercap.steering.edits import Edit, RankOne, Vector, number_in


@dataclass(frozen=True, eq=False, repr=False)
class SAEFeature(Edit):
    """Edit that sets one SAE feature to `value`; the part of the row that the feature does not explain stays.

    h <- h + (value - f(h·encoder + bias)) decoder. f(p) is p above `threshold`, else 0: relu, or with a threshold
    jumprelu.

    Args:
        encoder: the feature's encoder weights, [hidden], used as they are.
        decoder: its decoder weights, [hidden], used as they are.
        value: its activation afterwards; 0 switches it off.
        bias: its encoder bias.
        decoder_bias: [hidden]; the bias that the SAE subtracts from a row before encoding it, or None.
        threshold: threshold of a jumprelu SAE, 0 or above.
        layer, layers, site, tokens, part, model: see `Edit`.
    """

    encoder: Vector
    decoder: Vector
    value: float
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


MEMBER = SAEFeature
