"""Rows of a handle that were moved to disk: an outline in memory, with the numbers in the spill file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from steercap.captures.rows import Found
from steercap.files.spill import Bytes, SpillFile, Stored

_META: Final = torch.device("meta")


@dataclass(frozen=True)
class Spilled:
    """Checked rows that were written to disk.

    Args:
        file: the spill file with the numbers.
        stored: their place in it.
        outline: the rows, with tensors that have a shape and a dtype and no memory.
    """

    file: SpillFile
    stored: Stored
    outline: Found

    @staticmethod
    def write(found: Found, file: SpillFile, dropped: Callable[[], object]) -> Spilled:
        """Write rows to disk; coded rows as codes.

        Args:
            found: the rows.
            file: the spill file.
            dropped: see `SpillFile.put`.

        Raises:
            CaptureMemoryFull, ModelClosed, OSError: see `SpillFile.put`.
        """
        arrays: list[Bytes] = []

        def outlined(tensor: torch.Tensor) -> torch.Tensor:
            arrays.append(tensor.contiguous().flatten().view(torch.uint8).numpy())
            return torch.empty_like(tensor, device=_META, memory_format=torch.contiguous_format)

        outline = found._replace(captures=found.captures.changed(outlined))
        return Spilled(file, file.put(arrays, dropped), outline)

    def read(self) -> Found:
        """Read the rows into memory of their own, and check their bytes by hash against those written.

        Raises:
            CaptureIncomplete: the file does not hold what was written.
            ModelClosed: the model was closed.
        """
        arrays = iter(self.file.read(self.stored))

        def filled(outline: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(next(arrays)).view(outline.dtype).view(outline.shape)

        return self.outline._replace(captures=self.outline.captures.changed(filled))
