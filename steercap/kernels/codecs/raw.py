"""Raw encoding: rows kept bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from steercap.kernels.codecs import Encoding, dtype_of

if TYPE_CHECKING:
    import torch

    from steercap.core.schema import Coding, PointSchema


class Raw(Encoding):
    """Encoding of rows as their bytes."""

    is_codec: ClassVar[bool] = True

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return schema.shard_width * dtype_of(schema).itemsize

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        return rows.to(dtype_of(schema)).contiguous().view(torch.uint8)

    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        return stored.view(dtype_of(schema)).view(-1, *schema.shard_shape)


MEMBER = Raw()
