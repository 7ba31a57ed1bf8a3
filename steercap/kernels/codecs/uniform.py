"""Uniform quantisation: numbers as integer codes of equal steps. The arithmetic of the codecs, on the host."""

from __future__ import annotations

from typing import Final

import torch

from steercap.kernels.codecs.base import packed

#: Elements that are decoded at a time: in float64, so that an element is rounded once.
PART_ELEMENTS: Final = 1 << 20


def from_least(values: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0 to `steps` that span the last axis from its least number to its greatest: `zero + scale × code`.

    A number is off by `scale / 2` at most. Where one is not finite, scale is NaN.

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
    """Codes -`steps` to `steps` for numbers of either sign: `scale × code`.

    A number is off by `scale / 2` at most. Where one is not finite, scale is NaN.

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
    """What codes stand for, rounded once: float32, of their shape.

    Args:
        codes: [rows, n].
        scale, zero: of each, [rows, n] or [rows, 1].
        centre, reach: what was taken off, and divided by, before: [n].
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
    """[rows, n] as [rows, groups, size]; the last group is filled up with its row's last number."""
    missing = -values.shape[1] % size
    if missing:
        values = torch.cat([values, values[:, -1:].expand(-1, missing)], dim=1)
    grouped: torch.Tensor = values.unflatten(1, (-1, size))
    return grouped


def of_members(numbers: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """A number of each group, [rows, groups], for each of the group's members: [rows, count]."""
    return numbers.repeat_interleave(size, dim=1)[:, :count].contiguous()


def heads(*columns: torch.Tensor) -> torch.Tensor:
    """Scales and zero points as bytes, those of one group together: uint8 [rows, bytes].

    Args:
        columns: [rows] or [rows, groups] each.
    """
    numbers = torch.stack([column.float()[:, None].flatten(1) for column in columns], dim=-1)
    return numbers.flatten(1).contiguous().view(torch.uint8)


def floats(stored: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """`count` float32 numbers from byte `first` of each row on: [rows, count]; a copy, for rows need not be aligned."""
    return packed(stored[:, first : first + 4 * count]).view(torch.float32)


def columns_of(numbers: torch.Tensor) -> list[torch.Tensor]:
    """The last axis taken apart, each part in memory of its own."""
    return [column.clone(memory_format=torch.contiguous_format) for column in numbers.unbind(-1)]


def step_of(spread: torch.Tensor, steps: int) -> torch.Tensor:
    """The float32 step of which `steps` cover a spread; NaN where there is none."""
    step = (spread / steps).float()
    short = step.double() * steps < spread
    step = torch.where(short, step.nextafter(step.new_tensor(torch.inf)), step)
    return torch.where(step.isfinite(), step, torch.nan)


def _whole(codes: torch.Tensor, scale: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Codes as whole numbers, 0 where there is no step."""
    return torch.where((scale > 0)[..., None], codes, 0.0).round_().clamp_(least, most)
