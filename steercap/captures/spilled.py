"""Rows of a handle on disk: moved there, with an outline in memory; or gathered there from parts, and mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from steercap.captures.rows import Captures, Found
from steercap.core.receipt import Receipt
from steercap.errors import CaptureIncomplete
from steercap.files.spill import Bytes, SpillFile, Stored, nameless_file, needed_bytes

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


class GatheredRows:
    """Rows of one request that arrive in parts; their memory is mapped from a nameless file, to which the operating
    system writes it when memory is short.

    Args:
        folder: folder of the file.
        like: the first part, which gives the points, and the shapes and dtypes of their rows.
        rows: number of rows of all parts together.

    Raises:
        InvalidSetting, OSError: no such file can be made, or the disk has no room for it.
    """

    def __init__(self, folder: Path, like: Captures, rows: int) -> None:
        shapes: list[tuple[torch.Size, torch.dtype]] = []

        def noted(tensor: torch.Tensor) -> torch.Tensor:
            shapes.append((torch.Size((rows, *tensor.shape[1:])), tensor.dtype))
            return tensor

        like.changed(noted)
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in shapes]
        starts = np.cumsum([0, *(needed_bytes([size]) for size in sizes)]).tolist()
        self._memory = _mapped(folder, max(1, starts[-1]))
        self._tensors = [
            torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=size).view(dtype).view(shape)
            if size
            else torch.empty(shape, dtype=dtype)
            for start, size, (shape, dtype) in zip(starts, sizes, shapes, strict=False)
        ]
        self._like, self._receipts = like, list[Receipt]()
        self._rows, self._filled = rows, 0

    def add(self, part: Found) -> None:
        """Append the rows of the next part.

        Raises:
            CaptureIncomplete: more rows came than the request has.
        """
        count, tensors = len(part.receipt.positions), iter(self._tensors)
        if self._filled + count > self._rows:
            raise CaptureIncomplete(f"{self._filled + count} rows came for a request that has {self._rows}")

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            next(tensors)[self._filled : self._filled + count] = tensor
            return tensor

        part.captures.changed(copied)
        self._filled += count
        self._receipts.append(part.receipt)

    def found(self) -> Found:
        """Return the rows of all parts as one, with their labels; the mapped file lives as long as they do.

        Raises:
            CaptureIncomplete: parts are missing.
        """
        if self._filled < self._rows:
            raise CaptureIncomplete(f"{self._filled} rows came for a request that has {self._rows}")
        receipts, tensors = self._receipts, iter(self._tensors)
        positions, token_ids = (
            np.concatenate([getattr(receipt, name) for receipt in receipts]) for name in ("positions", "token_ids")
        )
        joined = replace(receipts[-1], positions=positions, token_ids=token_ids)
        return Found(self._like.changed(lambda _: next(tensors)), joined)


def _mapped(folder: Path, size: int) -> mmap.mmap:
    """Map a new nameless file, whose space is allocated, so that a full disk is an error here and no signal later."""
    fd = nameless_file(folder)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
