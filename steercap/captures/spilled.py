"""Rows of a handle on disk: moved there, with shapes and dtypes in memory; or gathered there from parts, and mapped."""

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
        file: the file that the bytes were written to.
        stored: location and hash of the bytes in the file.
        outline: the rows with meta tensors: shapes and dtypes, but no memory.
    """

    file: SpillFile
    stored: Stored
    outline: Found

    @staticmethod
    def write(found: Found, file: SpillFile, dropped: Callable[[], object]) -> Spilled:
        """Write rows to disk, coded rows as codes; return their location.

        Args:
            found: the rows and their receipt.
            file: the file to write to.
            dropped: function that is called when the rows on disk are no longer used; see `SpillFile.put`.

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
        """Read the rows from disk into new memory, and check the hash of the bytes.

        Raises:
            CaptureIncomplete: the bytes differ from those written.
            ModelClosed: the model was closed.
        """
        arrays = iter(self.file.read(self.stored))

        def filled(outline: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(next(arrays)).view(outline.dtype).view(outline.shape)

        return self.outline._replace(captures=self.outline.captures.changed(filled))


class GatheredRows:
    """Rows of one request that arrive in parts, in memory mapped from a nameless file: the system may page it out.

    Args:
        folder: folder of the file.
        like: the first part, which has the points, and the shapes and dtypes of their rows.
        rows: number of rows of all parts together.

    Raises:
        InvalidSetting, OSError: the file cannot be created, or the disk has no room for it.
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
            CaptureIncomplete: the parts have more rows than the request.
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
        """Return the rows of all parts joined, with their receipt; the mapped file lives as long as the rows.

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
    """Map a new nameless file of `size` bytes; its space is allocated, so that a full disk raises OSError here."""
    fd = nameless_file(folder)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
