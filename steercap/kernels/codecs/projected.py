"""Projections of rows: their scalar products with directions, float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from steercap.kernels.codecs import Alike, Encoding, added, dtype_of

if TYPE_CHECKING:
    import torch

    from steercap.core.schema import Coding, PointSchema

#: Bytes of a float32.
_FLOAT = 4


class Projected(Encoding):
    """Encoding of projections: a few numbers per row, packed so that a record of few directions takes one line."""

    align: ClassVar[int] = _FLOAT

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return coding.k * _FLOAT

    def takes(self, coding: Coding) -> bool:
        return coding.k > 0

    def vectors(self, coding: Coding) -> int:
        return coding.k

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        assert vectors is not None, "rows are projected on directions"
        return (rows.float() @ vectors.T).contiguous().view(torch.uint8)

    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        import torch

        return stored.view(torch.float32).view(-1, coding.k)

    def joined(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add up the products of the shards, which gives those of whole rows."""
        return added(shards)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, vectors: torch.Tensor) -> None:
        import torch

        from steercap.kernels.triton_rp import launch_project

        assert alike.directions is not None, "rows are projected on directions"
        rows = ring.view(dtype_of(alike.schema))
        width = alike.schema.shard_width
        launch_project(rows, ring.view(torch.float32), records, alike.points, width, vectors, alike.directions)


MEMBER = Projected()
