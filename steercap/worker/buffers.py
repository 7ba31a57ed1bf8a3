"""Capture buffers of requests whose rows leave the arena in chunks, or leave the worker as a summary of attention.

The worker writes the chunks to its file itself, so that no pass waits for the client. The arena holds a window of
consecutive rows. The window moves on only once all of its rows are in the file, each at the offset that follows from
its number: a row that is computed again overwrites its earlier version, as in the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch

from steercap.core.attention import AttentionRule
from steercap.core.messages import CapturedRows, LineRange, Owner
from steercap.core.plan import CapturePlan, Plan
from steercap.core.rows import Ints, RecordLines
from steercap.core.schema import LINE_BYTES, RAW
from steercap.kernels.attention import Attending, numbers_of, summarised
from steercap.kernels.codecs import ENCODINGS, record_of
from steercap.worker.arena import Arena, Layouts, Reads
from steercap.worker.capture_buffer import ArenaBuffer
from steercap.worker.chunk_file import ChunkFile


class ChunkedBuffer(ArenaBuffer):
    """Capture buffer with a window of the request's rows in the arena, and all rows before the window in a file.

    Args:
        owner, plan, capture, layouts, arena, reads: as for `CaptureBuffer`.
        file: the worker's file of rows that left memory.
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

    def mark_computed(self, start: int, stop: int, rows: int) -> None:
        super().mark_computed(start, stop, rows)
        self._saved = min(self._saved, int(self._ranks[start]))

    def _save(self, stop: int) -> None:
        """Write the window's rows below row number `stop` to the file; mark the rows as failed if the disk refuses."""
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


#: Attention logits computed per client call, on CPU (about 60 ms of a core) and on CUDA; passes wait meanwhile.
SLICE, DEVICE_SLICE = 1 << 22, 1 << 26
#: Cost of reading a block of queries, in logits; it is added to the number of logits of the block.
READING: Final = 1 << 16


class AttentionBuffer(ArenaBuffer):
    """Capture buffer whose queries and keys are replaced by a summary of attention, once the client asks for the rows.

    Until then the rows stay in the arena. `advance` computes a part, so that passes of other requests run in between.
    The summary of all layers overwrites the rows, and the pages that it leaves unused are freed.

    Args:
        rules: attention rule of this rank's heads, by layer.
        *given: arguments of `ArenaBuffer`.
    """

    def __init__(self, rules: Mapping[int, AttentionRule], *given: Any) -> None:
        super().__init__(*given)
        assert self.capture.attention is not None
        self._rules = rules
        self._pairs = [pair for pair in self.capture.attention.layers if pair[1] in self._points]
        self._queries = tuple(queries for _, queries, _ in self._pairs)
        self._work: Iterator[int] | None = None
        self._summarised, self._total = False, 0
        if any(layer not in rules or keys not in self._points for layer, _, keys in self._pairs):
            self.fail("its queries are on another rank than their keys")

    def reads(self, total: int) -> int:  # noqa: ARG002 -- a summary overwrites rows: none may be on its way
        return self.limit

    def advance(self, total: int, left: int) -> int:
        """Compute about `left` logits of the summary of the sequence's first `total` inputs.

        Returns:
            `left` less the logits computed; above 0 only if the summary is written or has failed.
        """
        if self._work is None:
            self._total = total
            self.stop()
            self._work = self._summarising(self.selected(total))
        elif total != self._total:
            self.fail(f"its attention was summarised for {self._total} inputs, but {total} were requested")
        try:
            while left > 0 and not self._summarised and not self.failure:
                left -= next(self._work, 0)
        except Exception as error:  # noqa: BLE001 -- of this request, and not of others
            self.fail(f"its attention cannot be summarised: {error}")
        return left

    def seal(self, total: int, first: int) -> CapturedRows:
        found = super().seal(total, first)
        return msgspec.structs.replace(found, coding=self.capture.sent, points=self._queries)

    def _summarising(self, rows: int) -> Iterator[int]:
        """Write the summary of the first `rows` rows over them, and free the pages that it leaves unused.

        Yields:
            The cost, in logits, of each block of queries once it is computed.
        """
        if not self._queries or not rows or self._missing(self._labels(rows)[0]) is not None:
            self._summarised = True
            return
        coding, schemas = self.capture.sent, self._layouts.schemas(self._queries)
        encoding, record = ENCODINGS[coding.encoding], record_of(schemas, coding)
        positions = torch.from_numpy(self._labels(rows)[0]).to(self._arena.device)
        stored = torch.zeros(rows, record.lines * LINE_BYTES, dtype=torch.uint8)
        each = zip(self._pairs, schemas, record.offsets, record.sizes, strict=True)
        for (layer, queries, keys), schema, offset, size in each:
            asked, known = self._rows_of(queries, rows), self._rows_of(keys, rows)
            for block in _blocks(rows, schema.shard_shape[0], SLICE):
                own = slice(0, block.stop)  # later keys are seen by no query of the block
                seen = asked[block], known[own], positions[block], positions[own]
                numbers = numbers_of(summarised(Attending(self._rules[layer], *seen), coding.k)).cpu()
                stored[block, offset : offset + size] = encoding.encode(numbers, schema, coding, None)
                yield READING + schema.shard_shape[0] * (block.stop - block.start) * block.stop
        self._places = RecordLines(self._places.pages, self._arena.shape, record.lines)
        self._arena.lines[self._lines_of(rows, 0, record.lines)] = stored.view(rows, -1, LINE_BYTES)
        self._keep(self._places.pages_of(rows))
        self._summarised = True

    def _rows_of(self, point: int, rows: int) -> torch.Tensor:
        """Read the first `rows` rows of one point to the model's device: [rows, heads of this rank, head_dim]."""
        assert self._layout is not None
        number = self._points.index(point)
        offset, size = self._layout.raw.offsets[number], self._layout.raw.sizes[number]
        held = self._arena.lines[self._lines_of(rows, offset // LINE_BYTES, -(-size // LINE_BYTES))]
        stored = held.flatten(1)[:, :size].contiguous().to(self._arena.device)
        return ENCODINGS["raw"].decode(stored, self._schemas[number], RAW)

    def _lines_of(self, rows: int, first: int, count: int) -> torch.Tensor:
        """Return the numbers of `count` lines of each record, from its line `first` on: int64 [rows, count]."""
        return torch.from_numpy(self._places.lines(np.arange(rows))[:, None] + np.arange(first, first + count))


def _blocks(rows: int, heads: int, logits: int) -> Iterator[slice]:
    """Yield slices of consecutive queries with about `logits` causal attention logits each, one query at least."""
    start = 0
    while start < rows:
        stop = min(rows, start + max(1, logits // (heads * (start + 1))))
        stop = min(stop, start + max(1, logits // (heads * stop)))
        yield slice(start, stop)
        start = stop


def advance(asked: Mapping[AttentionBuffer, int], device: torch.device) -> bool:
    """Compute a part of the attention summaries of some requests; return True once all are written.

    Args:
        asked: number of inputs of the sequence, by the request's buffer.
        device: the model's device; it determines how many logits are computed.
    """
    left = SLICE if device.type == "cpu" else DEVICE_SLICE
    for box, total in asked.items():
        left = box.advance(total, left)
        if left <= 0:
            return False
    return True
