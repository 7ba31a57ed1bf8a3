"""Eight-bit floating point, e4m3, with a scale for each row: `value = scale × q`.

A row's greatest magnitude becomes 448, the greatest of e4m3. Elements down to a 28,672nd of the greatest keep three
bits of mantissa: the error of an element is at most a sixteenth of its value, or `scale / 1024` if that is
more. A row that is not finite becomes NaN throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from steercap.kernels.bits import FP8_HEAD, FP8_MOST
from steercap.kernels.codecs import Alike, Codec, dtype_of, packed

if TYPE_CHECKING:
    import torch

    from steercap.core.schema import Coding, PointSchema

#: Half a unit in the last place of normal numbers, as a share of the number; and half of the least number.
_HALF_ULP: Final = 2.0**-4
_HALF_LEAST: Final = 2.0**-10


class FP8(Codec):
    """Codec of float8_e4m3fn codes behind their row's scale; decoded to float32."""

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return FP8_HEAD + schema.shard_width

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        from steercap.kernels.codecs.uniform import heads, step_of

        exact = rows.double()
        scale = step_of(exact.abs().amax(dim=1), FP8_MOST)
        ratio = torch.where((scale > 0)[:, None], exact / scale.double()[:, None], 0.0)
        codes = ratio.float().to(torch.float8_e4m3fn)
        return torch.cat([heads(scale), codes.view(torch.uint8)], dim=1)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        import torch

        from steercap.kernels.codecs.uniform import floats

        codes = packed(stored[:, FP8_HEAD:]).view(torch.float8_e4m3fn)
        return {"q": codes, "scale": floats(stored, 0, 1).flatten()}

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        from steercap.kernels.codecs.uniform import restored

        return restored(parts["q"].float(), parts["scale"][:, None]).view(-1, *schema.shard_shape)

    def bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        import torch

        scale = parts["scale"].double()[:, None]
        # The true element may be the larger one of the two that round to the same.
        relative = parts["q"].double().abs() * scale * (_HALF_ULP / (1 - _HALF_ULP))
        return torch.maximum(relative, scale * _HALF_LEAST).view(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_rp import launch_fp8

        launch_fp8(ring.view(dtype_of(alike.schema)), ring, records, alike.points, alike.schema.shard_width)


MEMBER = FP8()
