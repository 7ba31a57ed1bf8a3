"""What a codec is: how a row is laid into lines of the arena, and read back by the client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Encoding(ABC):
    """A reversible (or bounded-loss) form of rows between arena and client."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., width] as they are stored, bytes uint8 [..., stored bytes]."""

    @abstractmethod
    def decode(self, stored: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
        """Stored bytes uint8 [..., stored bytes] as rows of `dtype` [..., width]."""
