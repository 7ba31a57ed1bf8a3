"""Uniform quantisation: numbers as integer codes with equal steps. The arithmetic of the codecs, on the host."""

from __future__ import annotations

from typing import Final

import torch

from steercap.kernels.codecs import packed

#: Elements decoded at a time, in float64, so that each is rounded only once.
PART_ELEMENTS: Final = 1 << 20


def from_least(values: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise the last axis to codes 0 to `steps` between its minimum and maximum: `zero + scale × code`.

    The error of a number is at most `scale / 2`. Where a number is not finite, scale is NaN.

    Args:
        values: [..., n], of any floating dtype.
        steps: the greatest code.

    Returns:
        scale, float32 [...]; zero, float32 [...]; codes, float64 [..., n].
    """
    exact = values.double()  # in float32 the spread can be infinite, or half of it nothing
    zero, most = exact.aminmax(dim=-1)
    scale = step_of(most - zero, steps)
    codes = (exact - zero[..., None]) / scale.double()[..., None]
    return scale, zero.float(), _whole(codes, scale, 0, steps)


def about_zero(values: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise numbers of either sign to codes -`steps` to `steps`: `scale × code`.

    The error of a number is at most `scale / 2`. Where a number is not finite, scale is NaN.

    Args:
        values: [..., n], of any floating dtype.
        steps: the greatest code.

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
    """Dequantise codes, rounding once: float32, of their shape.

    Args:
        codes: [rows, n].
        scale, zero: scale and zero point, [rows, n] or [rows, 1].
        centre, reach: values that were subtracted, and then divided by, before coding: [n].
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
    """Split [rows, n] into [rows, groups, size]; the last group is padded with its row's last number."""
    missing = -values.shape[1] % size
    if missing:
        values = torch.cat([values, values[:, -1:].expand(-1, missing)], dim=1)
    grouped: torch.Tensor = values.unflatten(1, (-1, size))
    return grouped


def of_members(numbers: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Repeat one number per group, [rows, groups], for each member of the group: [rows, count]."""
    return numbers.repeat_interleave(size, dim=1)[:, :count].contiguous()


def heads(*columns: torch.Tensor) -> torch.Tensor:
    """Pack scales and zero points as bytes, those of one group together: uint8 [rows, bytes].

    Args:
        columns: tensors of [rows] or [rows, groups].
    """
    numbers = torch.stack([column.float()[:, None].flatten(1) for column in columns], dim=-1)
    return numbers.flatten(1).contiguous().view(torch.uint8)


def floats(stored: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Read `count` float32 numbers from byte `first` of each row: [rows, count]; copied, as rows may be unaligned."""
    return packed(stored[:, first : first + 4 * count]).view(torch.float32)


def columns_of(numbers: torch.Tensor) -> list[torch.Tensor]:
    """Split the last axis into tensors that own their memory."""
    return [column.clone(memory_format=torch.contiguous_format) for column in numbers.unbind(-1)]


def step_of(spread: torch.Tensor, steps: int) -> torch.Tensor:
    """Return `spread / steps` as float32, rounded up if `steps` steps would not reach `spread`; NaN if infinite."""
    step = (spread / steps).float()
    short = step.double() * steps < spread
    step = torch.where(short, step.nextafter(step.new_tensor(torch.inf)), step)
    return torch.where(step.isfinite(), step, torch.nan)


def _whole(codes: torch.Tensor, scale: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Round codes to whole numbers, 0 where the step is 0."""
    return torch.where((scale > 0)[..., None], codes, 0.0).round_().clamp_(least, most)
