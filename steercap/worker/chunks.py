"""Rows of one long sequence, which leave the arena for a file in chunks while their request runs.

The worker writes them itself, so that no pass waits for the client. Between the rows in the arena and those in the file
there is one rule: the window holds consecutive rows, and moves on only once all that it held is in the file, at the
place that follows from the row's number. So a row that is computed again overwrites its older self, as in the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from steercap.core.messages import CapturedRows, LineRange, Owner
from steercap.core.plan import CapturePlan, Plan
from steercap.core.rows import Ints
from steercap.worker.arena import Arena
from steercap.worker.capture_buffer import ArenaBuffer
from steercap.worker.chunk_file import ChunkFile
from steercap.worker.layouts import Layouts, Reads


class ChunkedBuffer(ArenaBuffer):
    """Capture buffer with a window of its rows in the arena, and all rows before it in the worker's file.

    Args:
        owner, plan, capture, layouts, arena, reads: as for `CaptureBuffer`.
        file: the worker's file.
        wait: function that waits until the rows of all passes so far are in the arena.
    """

    def __init__(  # noqa: PLR0917 -- as above
        self,
        owner: Owner,
        plan: Plan,
        capture: CapturePlan,
        layouts: Layouts,
        arena: Arena,
        reads: Reads,
        file: ChunkFile,
        wait: Callable[[], None],
    ) -> None:
        super().__init__(owner, plan, capture, layouts, arena, reads)
        self._file, self._wait = file, wait
        self._base = 0  # number of the first row in the window
        self._saved = 0  # rows of the window below it are in the file too
        self._region: int | None = None
        if self._uses_layout:
            self._region = file.take(super()._most * self._record)
            if self._region is None:
                self.fail(
                    f"the file of rows that leave memory has no room for {super()._most:,} rows; see spill_bytes="
                )

    @property
    def _most(self) -> int:
        return min(self.capture.window, super()._most)

    def _take(self, rows: Ints) -> Ints | None:
        first, last = int(rows.min()), int(rows.max()) + 1
        if self._region is None or not self._reach(last - first):
            return None
        if not self._base <= first <= last <= self._base + self._places.rows:
            self._wait()
            self._save(self._last)
            self._base = self._saved = self._last = first
        if self.failure:
            return None
        self._saved = min(self._saved, first)
        self._last = max(self._last, last)
        return self._places.lines(rows - self._base)

    def _take_ahead(self, start: int, end: int, shift: int) -> tuple[int, int | None]:
        row = start - shift - self._base
        if self._region is None or not self._reach(1) or not 0 <= row < self._places.rows:
            return start, None  # the window moves when the row is placed: those before it may still be computed
        stop, origin = self._places.block(row)
        return min(end, stop + self._base + shift), origin - (shift + self._base) * self._record

    def ran(self, start: int, stop: int) -> None:
        super().ran(start, stop)
        self._saved = min(self._saved, int(self._ranks[start]))

    def _save(self, stop: int) -> None:
        """Write the rows of the window below row `stop` to the file, or fail."""
        start = max(self._base, self._saved)
        if self._region is None or stop <= start:
            return
        line = self._region + start * self._record
        try:
            for lines in self._places.ranges(range(start - self._base, stop - self._base)):
                stored = self._arena.lines[lines.start : lines.start + lines.count]
                self._file.write(line, stored.reshape(-1).numpy())
                line += lines.count
        except OSError as error:
            self.fail(f"rows that leave memory cannot be written to disk: {error}")
        self._saved = stop

    def seal(self, total: int, first: int) -> CapturedRows:
        if self._uses_layout:
            self._save(min(self.selected(total), self._last))
        return super().seal(total, first)

    def _line_ranges(self, stored: range) -> Iterator[LineRange]:
        if self._region is not None and stored:
            yield LineRange(self._region + stored.start * self._record, len(stored) * self._record)

    def blocks(self, rows: int) -> Iterator[dict[int, torch.Tensor]]:
        self._save(min(rows, self._last))
        yield from super().blocks(rows)

    def _stopped(self) -> None:
        if self._region is not None and self._last > max(self._base, self._saved):
            self._wait()
            self._save(self._last)
        self._keep(0)

    def free(self) -> None:
        if self._region is not None:
            self._file.free(self._region)
            self._region = None
        super().free()
