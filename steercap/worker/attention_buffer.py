"""Capture buffer of a request whose queries and keys leave the worker as a summary of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from steercap.core.attention import AttentionRule
from steercap.core.messages import CapturedRows
from steercap.core.rows import RecordLines
from steercap.core.schema import LINE_BYTES, RAW
from steercap.errors import SteercapError
from steercap.kernels.attention import Attending, numbers_of, summarised
from steercap.kernels.codecs import ENCODINGS, record_of
from steercap.worker.capture_buffer import ArenaBuffer


class AttentionBuffer(ArenaBuffer):
    """Capture buffer whose queries and keys become a summary of attention, once the client asks for the rows.

    The rows stay in the arena until then. The summary of all layers is written over them, and the pages behind it are
    freed.

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
        self._summarised = False
        if any(layer not in rules or keys not in self._points for layer, _, keys in self._pairs):
            self.fail("its queries are on another rank than their keys")

    def reads(self, total: int) -> int:  # noqa: ARG002 -- a summary overwrites rows: none may be on its way
        return self.limit

    def seal(self, total: int, first: int) -> CapturedRows:
        rows = self.selected(total)
        computed = self._queries and rows and self._missing(self._labels(rows)[0]) is None
        if computed and not self._summarised and not self.failure:
            self.stop()
            try:
                self._summarise(rows)
            except (SteercapError, torch.OutOfMemoryError) as error:  # of this request, and not of others
                self.fail(f"its attention cannot be summarised: {error}")
        found = super().seal(total, first)
        return msgspec.structs.replace(found, coding=self.capture.sent, points=self._queries)

    def _summarise(self, rows: int) -> None:
        """Write the summary of the first rows over them, in the order of the rows, and free the pages behind it."""
        coding, schemas = self.capture.sent, self._layouts.schemas(self._queries)
        encoding, record = ENCODINGS[coding.encoding], record_of(schemas, coding)
        positions = torch.from_numpy(self._labels(rows)[0]).to(self._arena.device)
        stored = torch.zeros(rows, record.lines * LINE_BYTES, dtype=torch.uint8)
        each = zip(self._pairs, schemas, record.offsets, record.sizes, strict=True)
        for (layer, queries, keys), schema, offset, size in each:
            asked = self._rows_of(queries, rows), self._rows_of(keys, rows), positions, positions
            summary = summarised(Attending(self._rules[layer], *asked), coding.k)
            stored[:, offset : offset + size] = encoding.encode(numbers_of(summary).cpu(), schema, coding, None)
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
