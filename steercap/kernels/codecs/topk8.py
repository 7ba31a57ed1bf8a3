"""The k elements of greatest magnitude: their indices, and eight bits for each; the others count as zero.

`row[indices] = zero + scale × q`, indices ascending. Of elements of equal magnitude the first are kept. The error of a
kept element is at most half a step of its row, that of any other at most `rest`, the least magnitude that was kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from steercap.kernels.bits import FULL8_STEPS, TOPK8_HEAD
from steercap.kernels.codecs import Alike, Codec, dtype_of, packed

if TYPE_CHECKING:
    import torch

    from steercap.core.schema import Coding, PointSchema


class TopK8(Codec):
    """Codec of uint16 indices and uint8 codes, for rows with few elements that matter, such as `neurons`."""

    default_k: ClassVar[int] = 64
    indexed: ClassVar[bool] = True

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return TOPK8_HEAD + 3 * self._kept(schema, coding)

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        from steercap.kernels.codecs.uniform import from_least, heads

        order = rows.float().abs().sort(dim=1, descending=True, stable=True).indices
        indices = order[:, : self._kept(schema, coding)].sort(dim=1).values
        kept = rows.gather(1, indices)
        scale, zero, codes = from_least(kept, FULL8_STEPS)
        bad = ~rows.isfinite().all(dim=1)
        scale[bad] = torch.nan
        rest = kept.float().abs().amin(dim=1)
        where = indices.to(torch.uint16).view(torch.uint8)
        return torch.cat([heads(scale, zero, rest), where, codes.to(torch.uint8)], dim=1)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        import torch

        from steercap.kernels.codecs.uniform import columns_of, floats

        kept = self._kept(schema, coding)
        scale, zero, rest = columns_of(floats(stored, 0, 3))
        indices = packed(stored[:, TOPK8_HEAD : TOPK8_HEAD + 2 * kept]).view(torch.uint16)
        return {
            "q": packed(stored[:, TOPK8_HEAD + 2 * kept :]),
            "indices": indices,
            "scale": scale,
            "zero": zero,
            "rest": rest,
        }

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        from steercap.kernels.codecs.uniform import restored

        values = restored(parts["q"], parts["scale"][:, None], parts["zero"][:, None])
        rows = values.new_zeros((len(values), schema.shard_width))
        rows.scatter_(1, parts["indices"].long(), values)
        return rows.view(-1, *schema.shard_shape)

    def bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        most = parts["rest"].double()[:, None].repeat(1, schema.shard_width)
        half = (parts["scale"].double() / 2)[:, None].expand(parts["indices"].shape)
        return most.scatter_(1, parts["indices"].long(), half).view(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_uniform import launch_topk8

        width, kept = alike.schema.shard_width, self._kept(alike.schema, alike.coding)
        launch_topk8(ring.view(dtype_of(alike.schema)), ring, records, alike.points, width, kept)

    @staticmethod
    def _kept(schema: PointSchema, coding: Coding) -> int:
        """Return the number of elements kept of a shard: k of each, so that those of the whole row are among them."""
        return min(coding.k, schema.shard_width)


MEMBER = TopK8()
