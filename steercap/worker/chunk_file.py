"""File of a worker for rows that leave the arena while their request runs."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Final

import numpy as np
import torch

from steercap.core.schema import LINE_BYTES
from steercap.errors import WorkerFailure
from steercap.files.spill import BLOCK_BYTES, Bytes, nameless_file, punch, read_all, write_all

#: Lines of a block of the file.
_BLOCK_LINES: Final = BLOCK_BYTES // LINE_BYTES


class ChunkFile:
    """Nameless, sparse file, on the disk of a folder, for `lines` lines numbered from `first` on.

    Raises:
        InvalidSetting: no file can be created there.
    """

    def __init__(self, folder: Path, first: int, lines: int) -> None:
        self.first, self.lines = first, lines
        self._fd = nameless_file(folder)
        weakref.finalize(self, os.close, self._fd)
        self._regions: dict[int, int] = {}  # lines of each region, by its first

    @property
    def path(self) -> str:
        """Path by which another process of the same user can open the file while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def take(self, lines: int) -> int | None:
        """Reserve the lowest free run of `lines` lines; return the number of the first, or None if there is no room."""
        lines = -(-lines // _BLOCK_LINES) * _BLOCK_LINES
        start = 0
        for taken in sorted(self._regions):
            if taken - start >= lines:
                break
            start = taken + self._regions[taken]
        if start + lines > self.lines:
            return None
        self._regions[start] = lines
        return self.first + start

    def free(self, line: int) -> None:
        """Free a region and its disk space, given the line number that `take` returned for it."""
        start = line - self.first
        lines = self._regions.pop(start)
        if not self._regions:
            os.ftruncate(self._fd, 0)
        else:
            end = os.fstat(self._fd).st_size
            punch(self._fd, start * LINE_BYTES, min(lines * LINE_BYTES, end - start * LINE_BYTES))

    def write(self, line: int, data: Bytes) -> None:
        """Write bytes, uint8 [bytes], from the start of line number `line` on.

        Raises:
            OSError: the disk is full or fails.
        """
        write_all(self._fd, data, (line - self.first) * LINE_BYTES)

    def read(self, line: int, count: int) -> torch.Tensor:
        """Read `count` lines from line number `line` on: uint8 [count, LINE_BYTES].

        Raises:
            WorkerFailure: the file does not hold the lines, or cannot be read.
        """
        return read_lines(self._fd, line - self.first, count)


def read_lines(fd: int, line: int, count: int) -> torch.Tensor:
    """Read `count` lines of an open file, from line `line` counted from the file's start: uint8 [count, LINE_BYTES].

    Raises:
        WorkerFailure: the file does not hold the lines, or cannot be read.
    """
    found = np.empty((count, LINE_BYTES), dtype=np.uint8)
    try:
        size = read_all(fd, found.reshape(-1), line * LINE_BYTES)
    except OSError as error:
        raise WorkerFailure(f"rows that left memory cannot be read from disk: {error}") from error
    if size < found.nbytes:
        raise WorkerFailure(f"only {size:,} of {found.nbytes:,} bytes of rows that left memory are on disk")
    return torch.from_numpy(found)
