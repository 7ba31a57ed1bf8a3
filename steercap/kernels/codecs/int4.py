"""Four bits per element, in groups of 128 with a scale and a zero point each: `value = zero + scale × q`.

Two codes share a byte, the earlier element in the lower half. The error of an element is at most half a step of its
group, `scale / 2 = (max - min) / 30` of its 128 elements. A group that is not finite becomes NaN throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from steercap.kernels.bits import GROUP, INT4_STEPS
from steercap.kernels.codecs import Alike, Codec, dtype_of, packed

if TYPE_CHECKING:
    import torch

    from steercap.core.schema import Coding, PointSchema


class Int4(Codec):
    """Codec of 4-bit codes behind the scales and zero points of their groups; decoded to float32."""

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return 8 * _groups(schema) + -(-schema.shard_width // 2)

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        from steercap.kernels.codecs.uniform import from_least, groups_of, heads

        scale, zero, codes = from_least(groups_of(rows, GROUP), INT4_STEPS)
        width = rows.shape[1]
        flat = codes.to(torch.uint8).flatten(1)[:, : width + width % 2]
        flat[:, width:] = 0
        return torch.cat([heads(scale, zero), flat[:, ::2] + 16 * flat[:, 1::2]], dim=1)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        from steercap.kernels.codecs.uniform import columns_of, floats

        groups = _groups(schema)
        scale, zero = columns_of(floats(stored, 0, 2 * groups).view(-1, groups, 2))
        return {"q": packed(stored[:, 8 * groups :]), "scale": scale, "zero": zero}

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        import torch

        from steercap.kernels.codecs.uniform import restored

        packed = parts["q"]
        codes = torch.stack([packed % 16, packed // 16], dim=2).flatten(1)[:, : schema.shard_width]
        rows = restored(codes, _of_elements(parts["scale"], schema), _of_elements(parts["zero"], schema))
        return rows.view(-1, *schema.shard_shape)

    def bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        return _of_elements(parts["scale"], schema).double().view(-1, *schema.shard_shape) / 2

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_uniform import launch_int4

        launch_int4(ring.view(dtype_of(alike.schema)), ring, records, alike.points, alike.schema.shard_width)


def _groups(schema: PointSchema) -> int:
    return -(-schema.shard_width // GROUP)


def _of_elements(numbers: torch.Tensor, schema: PointSchema) -> torch.Tensor:
    from steercap.kernels.codecs.uniform import of_members

    return of_members(numbers, GROUP, schema.shard_width)


MEMBER = Int4()
