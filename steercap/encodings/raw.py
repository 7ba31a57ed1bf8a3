"""Rows kept bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steercap.encodings.base import Encoding

if TYPE_CHECKING:
    import torch


class Raw(Encoding):
    """The bytes of the row, nothing else."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        import torch

        return rows.contiguous().view(torch.uint8)

    def decode(self, stored: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
        return stored.view(dtype)[..., :width]


MEMBER = Raw()
