"""Eight bits an element: `value = zero + scale × code`, with the scale and zero point of each row.

A row's codes span its own least and greatest element, so an element is off by half a step at most:
`scale / 2 = (max - min) / 510`, and what rounding to the model's dtype took before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steercap.encodings.base import Alike, Encoding
from steercap.kernels.bits import FULL8_HEAD, FULL8_STEPS

if TYPE_CHECKING:
    import torch

    from steercap.core.schema import PointSchema


class Full8(Encoding):
    """uint8 codes behind their row's scale and zero point; decoded to float32."""

    def row_bytes(self, schema: PointSchema, numbers: int) -> int:
        return FULL8_HEAD + schema.shard_width

    def encode(self, rows: torch.Tensor, schema: PointSchema, directions: torch.Tensor | None) -> torch.Tensor:
        import torch

        values = rows.float()
        zero, most = values.aminmax(dim=1)
        # In halves, for the difference of two finite numbers may not be.
        scale = (most / 2 - zero / 2) * (2 / FULL8_STEPS)
        codes = (values / 2 - (zero / 2)[:, None]) / (scale / 2)[:, None]
        codes = torch.where((scale > 0)[:, None], codes, 0.0).round_().clamp_(0, FULL8_STEPS).to(torch.uint8)
        return torch.cat([torch.stack([scale, zero], dim=1).view(torch.uint8), codes], dim=1)

    def decode(self, stored: torch.Tensor, schema: PointSchema, numbers: int) -> torch.Tensor:
        import torch

        head = stored[:, :FULL8_HEAD].contiguous().view(torch.float32)
        half = head / 2
        rows = torch.addcmul(half[:, 1:], stored[:, FULL8_HEAD:].float(), half[:, :1]).mul_(2)
        return rows.view(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, bank: torch.Tensor) -> None:
        import torch

        from steercap.kernels.triton_full8 import launch_full8

        launch_full8(
            ring.view(getattr(torch, alike.schema.dtype)), ring, records, alike.points, alike.schema.shard_width
        )


MEMBER = Full8()
