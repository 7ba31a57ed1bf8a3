"""Norm as a linear map of directions, with the scale of the row taken as given.

RMSNorm and LayerNorm are `scale(row) * gain * (row - mean) + constant`, the mean subtracted by LayerNorm alone. Only
the scale depends on the row, and it is positive, so a direction is read as `gain * (direction - mean)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float

from steercap.errors import UnsupportedModel

#: Maximum distance of a normed row from its linear form, relative to the row's length.
LINEAR: Final = 1e-4


class FrozenNorm:
    """Norm whose scale is taken as given.

    Args:
        module: transformers' module with its weights, which may be gains, or gains minus one.
        width: number of elements of its input.

    Attributes:
        gain: factor of each element, float32 [width].
        constant: constant added at the end, float32 [width].
        centred: True if the mean is subtracted first.

    Raises:
        UnsupportedModel: the norm is not a scale and a gain, with or without a mean subtracted first.
    """

    def __init__(self, module: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
        self.module, self.width = module, width
        signs = torch.ones(1, width)
        signs[:, 1::2] = -1  # of mean 0 and length √width, where the width is even
        with torch.inference_mode():
            self.constant = module(torch.zeros(1, width))[0]
            self.gain = (module(signs)[0] - self.constant) * signs[0]
        self.centred = False
        tried = torch.randn(2, width, generator=torch.Generator().manual_seed(0)) + 1
        for centred in (False, True):
            self.centred = centred
            if self._is_linear(tried):
                return
        raise UnsupportedModel(f"{type(module).__name__} is no norm that can be frozen: a scale times a gain")

    def __call__(self, rows: Float[torch.Tensor, "*any width"]) -> Float[torch.Tensor, "*any width"]:
        """Apply the norm itself to whole rows."""
        with torch.inference_mode():
            found: torch.Tensor = self.module(rows)
            return found

    def linear(self, directions: Float[torch.Tensor, "*any width"]) -> Float[torch.Tensor, "*any width"]:
        """Map directions through the norm, up to the positive scale of the row: float32, of the same shape."""
        return self.gain * self._centre(directions.float())

    def through(self, readers: Float[torch.Tensor, "*any width"]) -> Float[torch.Tensor, "*any width"]:
        """Map weights behind the norm to what they read before it: `through(w) · v` is `w · linear(v)`."""
        return self._centre(readers.float() * self.gain)

    def scales(self, rows: Float[torch.Tensor, "rows width"]) -> Float[torch.Tensor, "rows 1"]:
        """Return the scale of each row: the norm is `scales * linear(rows) + constant`.

        Raises:
            UnsupportedModel: this does not hold for these rows.
        """
        scales, rest, length = self._fitted(rows)
        if not bool((rest <= LINEAR * length).all()):
            raise UnsupportedModel(f"{type(self.module).__name__} is no norm that can be frozen: a scale times a gain")
        return scales

    def _is_linear(self, rows: torch.Tensor) -> bool:
        scales, rest, length = self._fitted(rows)
        return bool((rest <= LINEAR * length).all() and (scales > 0).all())

    def _fitted(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fit the scale of each row by least squares; return it, the length of the residual, and of the normed row."""
        behind, scaled = self(rows.float()) - self.constant, self.linear(rows)
        scales = (behind * scaled).sum(dim=1, keepdim=True) / scaled.square().sum(dim=1, keepdim=True)
        return scales, (behind - scales * scaled).norm(dim=1), behind.norm(dim=1)

    def _centre(self, directions: torch.Tensor) -> torch.Tensor:
        return directions - directions.mean(dim=-1, keepdim=True) if self.centred else directions
