"""Capture buffer of a request whose queries and keys leave the worker as a summary of attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch

from steercap.core.attention import AttentionRule
from steercap.core.messages import CapturedRows
from steercap.core.rows import RecordLines
from steercap.core.schema import LINE_BYTES, RAW
from steercap.kernels.attention import Attending, numbers_of, summarised
from steercap.kernels.codecs import ENCODINGS, record_of
from steercap.worker.capture_buffer import ArenaBuffer

#: Logits computed for one answer on a CPU, about 60 ms of a core, and on a device: other requests wait as long.
SLICE, DEVICE_SLICE = 1 << 22, 1 << 26
#: Logits that reading a block of queries counts as, besides its own.
READING: Final = 1 << 16


class AttentionBuffer(ArenaBuffer):
    """Capture buffer whose queries and keys become a summary of attention, once the client asks for the rows.

    The rows stay in the arena until then. `advance` computes a part, so that passes of other requests run in between.
    The summary of all layers is written over the rows, and the pages behind it are freed.

    Args:
        rules: attention rule of this rank's heads, by layer.
        *given: as for `ArenaBuffer`.
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
        """Compute some of the summary of the first `total` inputs, until about `left` logits are.

        Returns:
            What remains of `left`, above 0 if the summary is written or cannot be.
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
        """Write the summary of the first rows over them, in the order of the rows, and free the pages behind it.

        Yields:
            The number of logits computed since.
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
        """Read the first rows of one point to the model's device: [rows, heads of this rank, head_dim]."""
        assert self._layout is not None
        number = self._points.index(point)
        offset, size = self._layout.raw.offsets[number], self._layout.raw.sizes[number]
        held = self._arena.lines[self._lines_of(rows, offset // LINE_BYTES, -(-size // LINE_BYTES))]
        stored = held.flatten(1)[:, :size].contiguous().to(self._arena.device)
        return ENCODINGS["raw"].decode(stored, self._schemas[number], RAW)

    def _lines_of(self, rows: int, first: int, count: int) -> torch.Tensor:
        """Return the indices of `count` lines of each record, from its line `first` on: int64 [rows, count]."""
        return torch.from_numpy(self._places.lines(np.arange(rows))[:, None] + np.arange(first, first + count))


def _blocks(rows: int, heads: int, logits: int) -> Iterator[slice]:
    """Yield blocks of consecutive queries with about `logits` logits each, one query at least."""
    start = 0
    while start < rows:
        stop = min(rows, start + max(1, logits // (heads * (start + 1))))
        stop = min(stop, start + max(1, logits // (heads * stop)))
        yield slice(start, stop)
        start = stop


def advance(asked: Mapping[AttentionBuffer, int], device: torch.device) -> bool:
    """Compute a part of the summaries of some requests; return True if all are written.

    Args:
        asked: number of inputs of each buffer's sequence.
        device: the model's device.
    """
    left = SLICE if device.type == "cpu" else DEVICE_SLICE
    for box, total in asked.items():
        left = box.advance(total, left)
        if left <= 0:
            return False
    return True
