"""Eight bits per element: `value = zero + scale × q`, of rows as they are, or centred and scaled before.

A row's codes span its own least and greatest element, so the error of an element is at most half a step,
`scale / 2 = (max - min) / 510`, plus the rounding of a float32. A row that is not finite becomes NaN throughout.

Centre and reach are per element, from a `Calibration`; scale and zero point are per row, as in `kernels.codecs.full8`,
so that nothing is clipped whatever the calibration data. Elements of different magnitude have
different steps: the error of an element is at most half of `reach × scale`, plus the rounding of the coded numbers,
which are float32. A row that is not finite, before or after scaling, becomes NaN throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from steercap.core.schema import LINE_BYTES
from steercap.kernels.bits import FULL8_HEAD, FULL8_STEPS
from steercap.kernels.codecs import Alike, Codec, dtype_of, packed

if TYPE_CHECKING:
    import torch

    from steercap.core.schema import Coding, PointSchema


class Full8(Codec):
    """Codec of uint8 codes behind their row's scale and zero point; decoded to float32."""

    align: ClassVar[int] = LINE_BYTES

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return FULL8_HEAD + schema.shard_width

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        from steercap.kernels.codecs.uniform import from_least, heads

        scale, zero, codes = from_least(rows, FULL8_STEPS)
        return torch.cat([heads(scale, zero), codes.to(torch.uint8)], dim=1)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        from steercap.kernels.codecs.uniform import columns_of, floats

        scale, zero = columns_of(floats(stored, 0, 2))
        return {"q": packed(stored[:, FULL8_HEAD:]), "scale": scale, "zero": zero}

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        from steercap.kernels.codecs.uniform import restored

        rows = restored(parts["q"], parts["scale"][:, None], parts["zero"][:, None])
        return rows.view(-1, *schema.shard_shape)

    def bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        half = parts["scale"].double()[:, None] / 2
        return half.expand(-1, schema.shard_width).reshape(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_uniform import launch_full8

        rows = ring.view(dtype_of(alike.schema))
        launch_full8(rows, ring, records, alike.points, alike.schema.shard_width)


#: Name of the encoding, which `codec=` does not accept.
CALIBRATED: Final = "calibrated8"
#: Error of two roundings to float32 and that of a zero point, as a share of the greatest coded number.
ROUNDED: Final = 2.0**-22


class Calibrated8(Full8):
    """Codec of calibrated rows: `full8` of rows minus their centre, divided by their reach."""

    is_codec: ClassVar[bool] = False
    constants: ClassVar[tuple[str, ...]] = ("centre", "reach")

    def vectors(self, coding: Coding) -> int:
        return len(self.constants)

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        assert vectors is not None, "rows are calibrated"
        return super().encode((rows.float() - vectors[0]) / vectors[1], schema, coding, None)

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        from steercap.kernels.codecs.uniform import restored

        rows = restored(
            parts["q"], parts["scale"][:, None], parts["zero"][:, None], centre=parts["centre"], reach=parts["reach"]
        )
        return rows.view(-1, *schema.shard_shape)

    def bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        scale, zero = parts["scale"].double(), parts["zero"].double()
        within = scale / 2 + ROUNDED * (zero.abs() + FULL8_STEPS * scale)
        return (within[:, None] * parts["reach"].double()).view(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, alike: Alike, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_uniform import launch_full8

        assert alike.directions is not None, "rows are calibrated"
        rows = ring.view(dtype_of(alike.schema))
        launch_full8(rows, ring, records, alike.points, alike.schema.shard_width, vectors, alike.directions)


MEMBERS = {
    "full8": Full8(),
    "calibrated8": Calibrated8(),
}
