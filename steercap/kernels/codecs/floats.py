"""Encodings as floating-point numbers: unchanged rows, float32 reductions and projections, and e4m3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from steercap.core.schema import RAW, REDUCED
from steercap.kernels.bits import FP8_HEAD, FP8_MOST, exact_products
from steercap.kernels.codecs import Codec, Encoding, PointTables, added, dtype_of, packed
from steercap.kernels.codecs.uniform import floats, pack_scales, restored, step_of

if TYPE_CHECKING:
    from steercap.core.schema import Coding, PointSchema


class Raw(Encoding):
    """Encoding that stores rows unchanged, in their dtype."""

    is_codec: ClassVar[bool] = True

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return schema.shard_width * dtype_of(schema).itemsize

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        return rows.to(dtype_of(schema)).contiguous().view(torch.uint8)

    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        return stored.view(dtype_of(schema)).view(-1, *schema.shard_shape)


#: Bytes of a float32.
_FLOAT: Final = 4


class Reduced(Encoding):
    """Encoding of a reduction as float32, whatever the model's dtype."""

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return schema.shard_width * _FLOAT

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        return rows.float().contiguous().view(torch.uint8)

    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        return stored.view(torch.float32).view(-1, *schema.shard_shape)


class ProjectionEncoding(Encoding):
    """Encoding of projections on directions, `k` float32 numbers per row, aligned to 4 bytes."""

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
        assert vectors is not None, "rows are projected on directions"
        with exact_products():
            return (rows.float() @ vectors.T).contiguous().view(torch.uint8)

    def decode(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> torch.Tensor:
        return stored.view(torch.float32).view(-1, coding.k)

    def joined(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add up the shards' scalar products, which gives those of whole rows."""
        return added(shards)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, tables: PointTables, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_rp import launch_project

        assert tables.directions is not None, "rows are projected on directions"
        rows = ring.view(dtype_of(tables.schema))
        width = tables.schema.shard_width
        launch_project(rows, ring.view(torch.float32), records, tables.points, width, vectors, tables.directions)


#: Maximum relative rounding error of normal e4m3 numbers.
_HALF_ULP: Final = 2.0**-4
#: Half of the smallest denormal e4m3 number, and what float32 rounds of a number next to the middle of two.
_HALF_LEAST: Final = 2.0**-10 * (1 + 2.0**-16)


class FP8(Codec):
    """Codec with float8_e4m3fn codes and a float32 scale per row, `value = scale × q`; decoded to float32.

    A row's maximum magnitude is scaled to 448, the maximum of e4m3. Elements down to 1/28,672 of it keep three bits of
    mantissa: an element's error is at most 1/16 of its value, or `scale / 1024` if that is more. A row with NaN or
    infinity becomes all NaN.
    """

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return FP8_HEAD + schema.shard_width

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        exact = rows.double()
        scale = step_of(exact.abs().amax(dim=1), FP8_MOST)
        ratio = torch.where((scale > 0)[:, None], exact / scale.double()[:, None], 0.0)
        codes = ratio.float().to(torch.float8_e4m3fn)
        return torch.cat([pack_scales(scale), codes.view(torch.uint8)], dim=1)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        codes = packed(stored[:, FP8_HEAD:]).view(torch.float8_e4m3fn)
        return {"q": codes, "scale": floats(stored, 0, 1).flatten()}

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        return restored(parts["q"].float(), parts["scale"][:, None]).view(-1, *schema.shard_shape)

    def error_bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        scale = parts["scale"].double()[:, None]
        # The true element may be the larger one of the two that round to the same.
        relative = parts["q"].double().abs() * scale * (_HALF_ULP / (1 - _HALF_ULP))
        return torch.maximum(relative, scale * _HALF_LEAST).view(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, tables: PointTables, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_rp import launch_fp8

        launch_fp8(ring.view(dtype_of(tables.schema)), ring, records, tables.points, tables.schema.shard_width)


_REDUCED = Reduced()
MEMBERS = {
    "raw": Raw(),
    "reduced": _REDUCED,
    "projected": ProjectionEncoding(),
    "fp8": FP8(),
}


def accumulator_records(schemas: Sequence[PointSchema], held: int) -> int:
    """Return the arena space of a running reduction, in raw records: its float32 rows and the rows kept apart.

    Args:
        schemas: schemas of the reduction's points.
        held: number of newest rows that are kept apart.
    """
    raw = Raw().record(schemas, RAW).lines
    return (-(-_REDUCED.record(schemas, REDUCED).lines // raw) if raw else 0) + held
