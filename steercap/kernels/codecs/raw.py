"""Raw encoding, rows kept bit for bit; and that of reductions, one float32 row in place of all of a request's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from steercap.core.schema import RAW, REDUCED
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


#: Bytes of a float32.
_FLOAT = 4


class Reduced(Encoding):
    """Encoding of a reduced row as float32, whatever the model's dtype."""

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return schema.shard_width * _FLOAT

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        return rows.float().contiguous().view(torch.uint8)

    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        import torch

        return stored.view(torch.float32).view(-1, *schema.shard_shape)


_REDUCED = Reduced()
MEMBERS = {
    "raw": Raw(),
    "reduced": _REDUCED,
}


def accumulator_records(schemas: Sequence[PointSchema], held: int) -> int:
    """Return a reduction's size in the arena, in raw records: its float32 rows and the rows held apart.

    Args:
        schemas: schemas of its points.
        held: number of rows held apart.
    """
    raw = Raw().record(schemas, RAW).lines
    return (-(-_REDUCED.record(schemas, REDUCED).lines // raw) if raw else 0) + held
