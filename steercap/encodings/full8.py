"""Eight bits per element: `value = zero + scale × code`, with the scale and zero point of each row.

A row's codes span its own least and greatest element, so an element is off by half a step at most:
`scale / 2 = (max - min) / 510`, and by the rounding of a float32. A row that is not finite becomes NaN throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from steercap.encodings.base import Alike, Encoding, dtype_of
from steercap.kernels.bits import FULL8_HEAD, FULL8_STEPS

if TYPE_CHECKING:
    import torch

    from steercap.core.schema import PointSchema


#: Elements that are decoded at a time: in float64, so that an element is rounded once.
PART_ELEMENTS: Final = 1 << 20


class Full8(Encoding):
    """uint8 codes behind their row's scale and zero point; decoded to float32."""

    is_codec: ClassVar[bool] = True

    def row_bytes(self, schema: PointSchema, numbers: int) -> int:
        return FULL8_HEAD + schema.shard_width

    def encode(self, rows: torch.Tensor, schema: PointSchema, directions: torch.Tensor | None) -> torch.Tensor:
        import torch

        values = rows.double()  # in float32 the spread of a row can be infinite, or half of it nothing
        zero, most = values.aminmax(dim=1)
        spread = most - zero
        scale = (spread / FULL8_STEPS).float()
        short = scale.double() * FULL8_STEPS < spread
        scale = torch.where(short, scale.nextafter(scale.new_tensor(torch.inf)), scale)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        codes = (values - zero[:, None]) / scale.double()[:, None]
        codes = torch.where((scale > 0)[:, None], codes, 0.0).round_().clamp_(0, FULL8_STEPS).to(torch.uint8)
        return torch.cat([torch.stack([scale, zero.float()], dim=1).view(torch.uint8), codes], dim=1)

    def decode(self, stored: torch.Tensor, schema: PointSchema, numbers: int) -> torch.Tensor:
        import torch

        # A copy, since rows of this many bytes need not be aligned for float32.
        head = stored[:, :FULL8_HEAD].flatten().clone().view(torch.float32).view(-1, 2).double()
        rows = torch.empty((len(stored), stored.shape[1] - FULL8_HEAD))
        largest = torch.finfo(torch.float32).max
        for first in range(0, len(rows), part := max(1, PART_ELEMENTS // max(rows.shape[1], 1))):
            own = slice(first, first + part)
            values = torch.addcmul(head[own, 1:], stored[own, FULL8_HEAD:].double(), head[own, :1])
            rows[own] = values.clamp_(-largest, largest)
        return rows.view(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, bank: torch.Tensor) -> None:
        from steercap.kernels.triton_full8 import launch_full8

        rows = ring.view(dtype_of(alike.schema))
        launch_full8(rows, ring, records, alike.points, alike.schema.shard_width)


MEMBER = Full8()
