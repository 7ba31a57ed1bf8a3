"""Uniform quantisation to integer codes with equal steps: arithmetic, and codecs of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from steercap.core.schema import LINE_BYTES
from steercap.kernels.bits import FULL8_HEAD, FULL8_STEPS, GROUP, INT4_STEPS
from steercap.kernels.codecs import Codec, PointTables, dtype_of, packed

if TYPE_CHECKING:
    from steercap.core.schema import Coding, PointSchema

#: Bound of float32 rounding errors in coding, relative to the maximum coded number.
ROUNDED: Final = 2.0**-21
#: Maximum number of elements decoded at once, in float64 before they are rounded to float32.
PART_ELEMENTS: Final = 1 << 20


def from_least(values: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise the last axis to codes 0 to `steps` from its minimum to its maximum: `zero + scale × code`.

    The error of a number is at most `scale / 2`. If a number is NaN or infinite, scale is NaN.

    Args:
        values: [..., n], of any floating dtype.
        steps: maximum code.

    Returns:
        scale, float32 [...]; zero, float32 [...]; codes, float64 [..., n].
    """
    exact = values.double()  # in float32 the spread can be infinite, or half of it nothing
    zero, most = exact.aminmax(dim=-1)
    scale = step_of(most - zero, steps)
    codes = (exact - zero[..., None]) / scale.double()[..., None]
    return scale, zero.float(), _whole(codes, scale, 0, steps)


def about_zero(values: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last axis to codes -`steps` to `steps`, symmetrically about zero: `scale × code`.

    The error of a number is at most `scale / 2`. If a number is NaN or infinite, scale is NaN.

    Args:
        values: [..., n], of any floating dtype.
        steps: maximum code.

    Returns:
        scale, float32 [...]; codes, float64 [..., n].
    """
    exact = values.double()
    scale = step_of(exact.abs().amax(dim=-1), steps)
    return scale, _whole(exact / scale.double()[..., None], scale, -steps, steps)


def restored(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    centre: torch.Tensor | None = None,
    reach: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantise codes to `(zero + scale × code) × reach + centre`, rounded once: float32 [rows, n].

    Args:
        codes: [rows, n].
        scale, zero: scale and zero point, [rows, n] or [rows, 1].
        centre, reach: calibration of each element, [n]: `centre` was subtracted before coding, then divided by `reach`;
            None for none.
    """
    rows = torch.empty(codes.shape, dtype=torch.float32)
    largest = torch.finfo(torch.float32).max
    for first in range(0, len(rows), part := max(1, PART_ELEMENTS // max(codes.shape[1], 1))):
        own = slice(first, first + part)
        values = codes[own].double() * scale[own].double()
        if zero is not None:
            values += zero[own].double()
        if centre is not None and reach is not None:
            values = values * reach.double() + centre.double()
        rows[own] = values.clamp_(-largest, largest)
    return rows


def groups_of(values: torch.Tensor, size: int) -> torch.Tensor:
    """Split [rows, n] into [rows, groups, size]; the last group is padded with the row's last number."""
    missing = -values.shape[1] % size
    if missing:
        values = torch.cat([values, values[:, -1:].expand(-1, missing)], dim=1)
    grouped: torch.Tensor = values.unflatten(1, (-1, size))
    return grouped


def of_members(numbers: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Repeat each group's number, [rows, groups], for the `size` members of the group: [rows, count]."""
    return numbers.repeat_interleave(size, dim=1)[:, :count].contiguous()


def pack_scales(*columns: torch.Tensor) -> torch.Tensor:
    """Pack scales and zero points as float32 bytes, interleaved by group: uint8 [rows, bytes].

    Args:
        columns: tensors [rows] or [rows, groups].
    """
    numbers = torch.stack([column.float()[:, None].flatten(1) for column in columns], dim=-1)
    return numbers.flatten(1).contiguous().view(torch.uint8)


def floats(stored: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Read `count` float32 numbers from byte offset `first` of each row, copied: [rows, count]."""
    return packed(stored[:, first : first + 4 * count]).view(torch.float32)


def columns_of(numbers: torch.Tensor) -> list[torch.Tensor]:
    """Split the last axis into contiguous copies."""
    return [column.clone(memory_format=torch.contiguous_format) for column in numbers.unbind(-1)]


def half_step(scale: torch.Tensor, steps: int) -> torch.Tensor:
    """Bound the error of numbers coded in up to `steps` steps of `scale`, float64.

    It is half a step, and what float32 rounds: a number next to the middle of two codes may get the farther one.
    """
    return scale.double() * (0.5 + steps * ROUNDED)


def step_of(spread: torch.Tensor, steps: int) -> torch.Tensor:
    """Return `spread / steps` as float32, rounded up if `steps` steps would fall short of `spread`; NaN if infinite."""
    step = (spread / steps).float()
    short = step.double() * steps < spread
    step = torch.where(short, step.nextafter(step.new_tensor(torch.inf)), step)
    return torch.where(step.isfinite(), step, torch.nan)


def _whole(codes: torch.Tensor, scale: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Round codes to integers from `least` to `most`; 0 where the scale is 0."""
    return torch.where((scale > 0)[..., None], codes, 0.0).round_().clamp_(least, most)


class Int4(Codec):
    """Codec of 4-bit codes with a float32 scale and zero point per group of 128 elements; decoded to float32.

    `value = zero + scale × q`. Two codes share a byte, the earlier element in the lower half. The error of an element
    is at most `scale / 2`, that is `(max - min) / 30` over its group. A group with NaN or infinity becomes all NaN.
    """

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return 8 * _group_count(schema) + -(-schema.shard_width // 2)

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        scale, zero, codes = from_least(groups_of(rows, GROUP), INT4_STEPS)
        width = rows.shape[1]
        flat = codes.to(torch.uint8).flatten(1)[:, : width + width % 2]
        flat[:, width:] = 0
        return torch.cat([pack_scales(scale, zero), flat[:, ::2] + 16 * flat[:, 1::2]], dim=1)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        groups = _group_count(schema)
        scale, zero = columns_of(floats(stored, 0, 2 * groups).view(-1, groups, 2))
        return {"q": packed(stored[:, 8 * groups :]), "scale": scale, "zero": zero}

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        packed = parts["q"]
        codes = torch.stack([packed % 16, packed // 16], dim=2).flatten(1)[:, : schema.shard_width]
        rows = restored(codes, _of_elements(parts["scale"], schema), _of_elements(parts["zero"], schema))
        return rows.view(-1, *schema.shard_shape)

    def error_bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        within = half_step(parts["scale"], INT4_STEPS)
        return _of_elements(within, schema).view(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, tables: PointTables, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_uniform import launch_int4

        launch_int4(ring.view(dtype_of(tables.schema)), ring, records, tables.points, tables.schema.shard_width)


def _group_count(schema: PointSchema) -> int:
    return -(-schema.shard_width // GROUP)


def _of_elements(numbers: torch.Tensor, schema: PointSchema) -> torch.Tensor:
    return of_members(numbers, GROUP, schema.shard_width)


class Full8(Codec):
    """Codec of uint8 codes with a float32 scale and zero point per row, `value = zero + scale × q`; decoded to float32.

    A row's codes range from its minimum to its maximum, so the error of an element is at most `scale / 2 = (max - min)
    / 510`, plus float32 rounding. A row with NaN or infinity becomes all NaN.
    """

    align: ClassVar[int] = LINE_BYTES

    def row_bytes(self, schema: PointSchema, coding: Coding) -> int:
        return FULL8_HEAD + schema.shard_width

    def encode(
        self, rows: torch.Tensor, schema: PointSchema, coding: Coding, vectors: torch.Tensor | None
    ) -> torch.Tensor:
        scale, zero, codes = from_least(rows, FULL8_STEPS)
        return torch.cat([pack_scales(scale, zero), codes.to(torch.uint8)], dim=1)

    def parts(self, stored: torch.Tensor, schema: PointSchema, coding: Coding) -> dict[str, torch.Tensor]:
        scale, zero = columns_of(floats(stored, 0, 2))
        return {"q": packed(stored[:, FULL8_HEAD:]), "scale": scale, "zero": zero}

    def decoded(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        rows = restored(parts["q"], parts["scale"][:, None], parts["zero"][:, None])
        return rows.view(-1, *schema.shard_shape)

    def error_bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        within = half_step(parts["scale"], FULL8_STEPS)[:, None]
        return within.expand(-1, schema.shard_width).reshape(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, tables: PointTables, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_uniform import launch_full8

        rows = ring.view(dtype_of(tables.schema))
        launch_full8(rows, ring, records, tables.points, tables.schema.shard_width)


#: Name of the encoding of calibrated rows, which `CaptureSpec(codec=)` does not accept.
CALIBRATED: Final = "calibrated8"


class Calibrated8(Full8):
    """Codec of calibrated rows: `full8` of `(row - centre) / reach`.

    `centre` and `reach` are vectors, one number per element, from a `Calibration`; scale and zero point are per row, as
    in `full8`, so that nothing is clipped whatever the calibration data. The error of an element is at most `reach ×
    scale / 2`, plus float32 rounding. A row with NaN or infinity, before or after scaling, becomes all NaN.
    """

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
        rows = restored(
            parts["q"], parts["scale"][:, None], parts["zero"][:, None], centre=parts["centre"], reach=parts["reach"]
        )
        return rows.view(-1, *schema.shard_shape)

    def error_bound(self, parts: Mapping[str, torch.Tensor], schema: PointSchema, coding: Coding) -> torch.Tensor:
        within = half_step(parts["scale"], FULL8_STEPS) + ROUNDED * parts["zero"].double().abs()
        return (within[:, None] * parts["reach"].double()).view(-1, *schema.shard_shape)

    def launch(self, ring: torch.Tensor, records: torch.Tensor, tables: PointTables, vectors: torch.Tensor) -> None:
        from steercap.kernels.triton_uniform import launch_full8

        assert tables.directions is not None, "rows are calibrated"
        rows = ring.view(dtype_of(tables.schema))
        launch_full8(rows, ring, records, tables.points, tables.schema.shard_width, vectors, tables.directions)


MEMBERS = {
    "full8": Full8(),
    "calibrated8": Calibrated8(),
    "int4": Int4(),
}
