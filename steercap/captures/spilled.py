"""Rows of a handle that were moved to disk: all of them but the numbers, which are in the spill file."""

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
    """Rows that were checked, and then written.

    Args:
        file: where the numbers are.
        stored: which of them.
        outline: the rows, with tensors that have a shape and a dtype and no memory.
    """

    file: SpillFile
    stored: Stored
    outline: Found

    @staticmethod
    def write(found: Found, file: SpillFile, dropped: Callable[[], object]) -> Spilled:
        """Write rows; codes of a codec as codes.

        Args:
            found: the rows.
            file: where to.
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
        """The rows, in memory of their own, each byte compared with what was written by its hash.

        Raises:
            CaptureIncomplete: the file does not hold what was written.
            ModelClosed: the model was closed.
        """
        arrays = iter(self.file.read(self.stored))

        def filled(outline: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(next(arrays)).view(outline.dtype).view(outline.shape)

        return self.outline._replace(captures=self.outline.captures.changed(filled))
