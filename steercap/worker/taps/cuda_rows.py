"""Rows on the device: copies to the host merged into few, encoding, and running reductions.

All rows lie in one ring of lines: the raw records of a pass as the model computes them, followed by the encoded
records, where a layout has an encoding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final
from weakref import ref

import numpy as np
import torch

from steercap.core.program import NONE
from steercap.core.rows import Ints
from steercap.core.schema import LINE_BYTES, REDUCED, Coding, PointSchema, RecordShape
from steercap.kernels import triton_accumulate as kernel
from steercap.kernels.codecs import ENCODINGS, PointTables, dtype_of, record_of
from steercap.kernels.codecs.random_projection import Matrices
from steercap.worker.accumulators import Accumulators, Updates
from steercap.worker.arena import RecordLayout
from steercap.worker.programs import Programs
from steercap.worker.step import Step
from steercap.worker.taps import Installed, RowKind, TapSizes
from steercap.worker.taps.transfers import Transfers

#: Maximum device memory for the ring of rows, as a share of all and in bytes, unless a CUDA graph or one layer needs
#: more.
SHARE: Final = 0.1
RING_BYTES: Final = 5 << 29


def runs(targets: Ints, sources: Ints, records: Ints) -> tuple[Ints, Ints, Ints]:
    """Merge records that are consecutive in both source and target into runs.

    Args:
        targets, sources: first target line and first source line of each record: int64 [records].
        records: number of lines of each record, one at least: int64 [records].

    Returns:
        First target line, first source line and number of lines of each run.
    """
    if not len(records):
        return targets, sources, records
    follows = [lines[1:] == lines[:-1] + records[:-1] for lines in (targets, sources)]
    first = np.flatnonzero(np.concatenate([[True], ~(follows[0] & follows[1])]))
    return targets[first], sources[first], np.add.reduceat(records, first)


def pieces(targets: Ints, sources: Ints, sizes: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Split copies, given by addresses and sizes in bytes, into pieces of at most `most` bytes each, in order."""
    if not len(sizes) or sizes.max() <= most:
        return targets, sources, sizes
    parts = -(-sizes // most)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    done = number * most
    left = np.repeat(sizes, parts) - done
    return np.repeat(targets, parts) + done, np.repeat(sources, parts) + done, np.minimum(left, most)


def overlap(targets: Ints, sizes: Ints) -> bool:
    """Return whether the targets of some copies overlap, so that the copies' order matters; sizes are in bytes."""
    order = np.argsort(targets)
    begins = targets[order]
    return bool((begins[1:] < (begins + sizes[order])[:-1]).any())


def grids(targets: Ints, sources: Ints, sizes: Ints, target_steps: Ints, source_steps: Ints) -> Ints:
    """Merge copies at regular distances into grids.

    Args:
        targets, sources, sizes: addresses and bytes of each copy, one at least: int64 [copies].
        target_steps, source_steps: bytes from each copy to the next one of the same grid, if there is one.

    Returns:
        The grids, int64 [grids, GRID_COLUMNS], as for `Transfers.fetch_grids`.
    """
    same = (sizes[1:] == sizes[:-1]) & (targets[1:] - targets[:-1] == target_steps[:-1])
    same &= (sources[1:] - sources[:-1] == source_steps[:-1]) & (target_steps[1:] == target_steps[:-1])
    same &= source_steps[1:] == source_steps[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~same]))
    rows = np.diff(np.append(first, len(sizes)))
    columns = (targets[first], sources[first], sizes[first], rows, target_steps[first], source_steps[first])
    return np.stack(columns, axis=1)


def typed(memory: torch.Tensor, schema: PointSchema) -> torch.Tensor:
    """View memory, uint8 [..., bytes], as elements of a point's dtype."""
    return memory.view(dtype_of(schema))


class DeviceEncoder:
    """Encoder of the records in the ring; it runs after the pass.

    Args:
        installed: points of the rank.
        programs: contents of the slots.
        bank: vector bank, float32 [vectors, bank width].
        transfers: copies to the device.
        tokens: maximum tokens of a pass.
        ahead: maximum number of passes whose tables are in use.
    """

    def __init__(  # noqa: PLR0917 -- the tables of a rank
        self,
        installed: Installed,
        programs: Programs,
        bank: torch.Tensor,
        transfers: Transfers,
        tokens: int,
        ahead: int,
    ) -> None:
        self._installed, self._programs, self._bank, self._transfers = installed, programs, bank, transfers
        self._records = torch.zeros((tokens, 2), dtype=torch.int64, device=transfers.device)
        self._uploads = [transfers.pinned(self._records.shape, torch.int64) for _ in range(ahead)]
        # Without the SAE encoders, which are freed with their layout.
        self._known: dict[int, tuple[ref[RecordLayout], int, list[tuple[RowKind, PointTables]]]] = {}
        self._matrices = Matrices()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned host buffers of uploads."""
        return sum(upload.nbytes for upload in self._uploads)

    def upload(
        self, number: int, layouts: Sequence[RecordLayout], of: Ints, records: Ints
    ) -> list[tuple[RecordLayout, slice]]:
        """Upload the lines of the records to encode, layout by layout, in one copy.

        Args:
            number: number of the pass.
            layouts: the distinct layouts in `of`, by ascending number.
            of: number of each record's layout, int64 [records].
            records: first line of each record in raw form, and in encoded form: int64 [records, 2].

        Returns:
            Each layout with the slice of the upload that holds its records.
        """
        order = np.argsort(of, kind="stable")
        buffer = self._uploads[number % len(self._uploads)]
        buffer.numpy()[: len(order)] = records[order]
        self._transfers.put(self._records, buffer, len(order))
        ends = np.searchsorted(of[order], [layout.number for layout in layouts], side="right").tolist()
        return [(layout, slice(*one)) for layout, *one in zip(layouts, [0, *ends], ends, strict=False)]

    def launch(self, ring: torch.Tensor, work: Sequence[tuple[RecordLayout, slice]]) -> None:
        """Launch the encoding of a pass's records in the ring; `work` is the result of `upload`."""
        for layout, records in work:
            encoders = [encoder for _, encoder in layout.form.reads]
            self._launch(ring, self._records[records], self._point_tables(layout), encoders)

    def encode(self, ring: torch.Tensor, layout: RecordLayout, records: Ints, points: range) -> None:
        """Launch the encoding of the rows of some points in records of one layout.

        Args:
            ring: memory with the records.
            layout: layout of the records.
            records: first line of each record in raw form, and in encoded form: int64 [records, 2].
            points: indices of the points on this rank.
        """
        pairs = zip(layout.locals, layout.form.reads, strict=False)
        encoders = [encoder for local, (_, encoder) in pairs if local in points]
        self._launch(ring, self._to_device(records), list(self._find_point_tables(layout, points)), encoders)

    def _launch(
        self,
        ring: torch.Tensor,
        records: torch.Tensor,
        tables: Sequence[tuple[RowKind, PointTables]],
        encoders: Sequence[Any],
    ) -> None:
        for number, (kind, known) in enumerate(tables):
            found = replace(known, encoder=encoders[number]) if encoders else known
            matrix = self._matrix(kind, found.coding)
            vectors = self._bank[:, kind.first : kind.first + kind.width] if matrix is None else matrix
            ENCODINGS[found.coding.encoding].launch(ring, records, found, vectors)

    def _matrix(self, kind: RowKind, coding: Coding) -> torch.Tensor | None:
        """Return the rank's columns of a seeded codec's matrix, in the dtype of the rows; None for other encodings."""
        encoding = ENCODINGS[coding.encoding]
        if not encoding.seeded:
            return None

        def make() -> torch.Tensor:
            whole = encoding.matrix(kind.schema.width, coding)
            assert whole is not None, "a codec with a seed has a matrix"
            part = whole[:, kind.first : kind.first + kind.width].to(dtype_of(kind.schema))
            return self._transfers.to_device(part.contiguous())

        return self._matrices.get((kind, coding), make)

    def _point_tables(self, layout: RecordLayout) -> list[tuple[RowKind, PointTables]]:
        """Return the points of a layout, grouped by equal schemas, for the encoding kernels; cached."""
        known = self._known.get(layout.number)
        if known is None or known[0]() is not layout or known[1] != self._programs.written:
            found = list(self._find_point_tables(layout, range(len(self._installed.points))))
            known = self._known[layout.number] = ref(layout), self._programs.written, found
        return known[2]

    def _find_point_tables(self, layout: RecordLayout, points: range) -> Iterator[tuple[RowKind, PointTables]]:
        if layout.form.reads:
            yield from self._find_read(layout, points)
            return
        kinds = [self._installed.kind_of(self._installed.schemas[local]) for local in layout.locals]
        directions = self._programs.projections.get(layout.form.slot)
        raw, stored = np.array(layout.raw.offsets) // LINE_BYTES, np.array(layout.stored.offsets)
        wanted = [local in points for local in layout.locals]
        for kind in dict.fromkeys(kind for kind, here in zip(kinds, wanted, strict=True) if here):
            own = np.array([number for number, other in enumerate(kinds) if other == kind and wanted[number]])
            bank_rows = None if directions is None else self._to_device(directions[np.array(layout.locals)[own]])
            places = self._to_device(np.stack([raw[own], stored[own]], axis=1))
            yield kind, PointTables(kind.schema, layout.form.coding, places, bank_rows)

    def _find_read(self, layout: RecordLayout, points: range) -> Iterator[tuple[RowKind, PointTables]]:
        """Yield the points of a layout whose rows SAEs read, each by itself, in the order of the SAEs."""
        found = zip(layout.locals, layout.raw.offsets, layout.stored.offsets, strict=True)
        for local, raw, stored in ((local, *both) for local, *both in found if local in points):
            schema = self._installed.schemas[local]
            at = self._to_device(np.array([[raw // LINE_BYTES, stored]], dtype=np.int64))
            yield self._installed.kind_of(schema), PointTables(schema, layout.form.coding, at)

    def _to_device(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return self._transfers.to_device(torch.from_numpy(np.ascontiguousarray(values)))


@dataclass(frozen=True)
class _Group:
    """Points of a rank with equal schemas, as the accumulators store them.

    Args:
        schema: schema of all these points.
        numbers: indices of the points on this rank, ascending.
        points: columns `NUMBER`, `SUM_AT`, `HELD_AT` of `kernels.triton_accumulate`, on the device.
        sums, held: memory of all sums, viewed as float32, and of all held rows, viewed in the points' dtype.
    """

    schema: PointSchema
    numbers: Sequence[int]
    points: torch.Tensor
    sums: torch.Tensor
    held: torch.Tensor


class DeviceAccumulators:
    """Running reductions of requests, on the device.

    An accumulator is a record of all points in the layout of `kernels.codecs.floats`; a held row is a raw record.

    Args:
        installed: points of the rank.
        accumulators: bookkeeping of the accumulators.
        layouts: line of each point in a record, by layout: int32 [layouts, points] on the device.
        transfers: copies between host and device.
        ahead: maximum number of passes whose tables are in use.
    """

    def __init__(
        self, installed: Installed, accumulators: Accumulators, layouts: torch.Tensor, transfers: Transfers, ahead: int
    ) -> None:
        self._accumulators, self._layouts, self._transfers = accumulators, layouts, transfers
        self._schemas = installed.schemas
        self._reduced = record_of(installed.schemas, REDUCED)
        self._raw = record_of(installed.schemas)
        total = max(accumulators.total if installed.captures else 0, 1)

        def memory(*shape: int) -> torch.Tensor:
            return torch.zeros((*shape, LINE_BYTES), dtype=torch.uint8, device=transfers.device)

        self._sums = memory(total, max(self._reduced.lines, 1)).flatten(1)
        self._held = memory(total, accumulators.held, max(self._raw.lines, 1)).flatten(2)
        self._updates = torch.zeros(
            (total, kernel.UPDATE_COLUMNS + 2 * accumulators.held), dtype=torch.int32, device=transfers.device
        )
        self._uploads = [transfers.pinned(self._updates.shape, torch.int32) for _ in range(ahead)]
        self._groups = list(self._find_groups(installed))
        self._leaving: dict[int, Any] = {}  # events of copies out of accumulators; a new reduction waits for them

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and of the held rows, on the device."""
        return self._sums.nbytes + self._held.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned host buffers of uploads."""
        return sum(upload.nbytes for upload in self._uploads)

    def _find_groups(self, installed: Installed) -> Iterator[_Group]:
        kinds = [installed.kind_of(schema) for schema in installed.schemas]
        for kind in dict.fromkeys(kinds):
            held = typed(self._held, kind.schema)
            points = [
                (
                    local,
                    self._reduced.offsets[local] // torch.float32.itemsize,
                    self._raw.offsets[local] // held.itemsize,
                )
                for local, other in enumerate(kinds)
                if other == kind
            ]
            there = self._transfers.to_device(torch.tensor(points, dtype=torch.int32))
            numbers = [number for number, *_ in points]
            yield _Group(kind.schema, numbers, there, self._sums.view(torch.float32), held)

    def upload(self, number: int, step: Step, updates: Updates, sources: Ints, records: Ints) -> None:
        """Upload the updates of a pass, in one copy.

        Args:
            number: number of the pass.
            step: step of the pass.
            updates: updates of the accumulators.
            sources: first line in the ring of each token's record, int64 [tracked].
            records: number of lines of each token's record, int64 [tracked].
        """
        buffer = self._uploads[number % len(self._uploads)]
        buffer.numpy()[: len(updates)] = self._table(step, updates, sources, records)
        self._transfers.put(self._updates, buffer, len(updates))

    def launch(self, ring: torch.Tensor, updates: int) -> None:
        """Apply the first `updates` updates of the last upload, with rows from the ring."""
        self._launch(ring, self._updates[:updates])

    def update(  # noqa: PLR0917 -- as for `upload`
        self, ring: torch.Tensor, step: Step, updates: Updates, sources: Ints, records: Ints, points: range
    ) -> None:
        """Apply the updates of a pass at some points (indices on this rank) at once; for the rest see `upload`."""
        table = self._table(step, updates, sources, records).astype(np.int32)
        self._launch(ring, self._transfers.to_device(torch.from_numpy(table)), points)

    def _launch(self, ring: torch.Tensor, updates: torch.Tensor, points: range | None = None) -> None:
        for one in self._groups:
            own, rows = one.points, typed(ring, one.schema)
            if points is not None:
                own = own[bisect_left(one.numbers, points.start) : bisect_left(one.numbers, points.stop)]
            if len(own):
                kernel.launch_accumulate(updates, own, one.schema.shard_width, self._layouts, one.sums, one.held, rows)

    def _table(self, step: Step, updates: Updates, sources: Ints, records: Ints) -> Ints:
        """Return the updates of a pass as a table for the kernel, after earlier copies out of the same accumulators."""
        table = self._table_of(updates, step.layouts[updates.first], 1)
        table[:, kernel.LINE], table[:, kernel.RECORD] = sources[updates.first], records[updates.first]
        table[:, -self._accumulators.held :] = np.where(updates.holds == NONE, NONE, sources[updates.holds])
        for accumulator in updates.accumulators[updates.fresh].tolist():
            if accumulator in self._leaving:
                self._transfers.hold(self._leaving.pop(accumulator))
        return table

    def _table_of(self, updates: Updates, layouts: Ints, divisors: Ints | int) -> Ints:
        """Return updates as a table for the kernel, without the lines: int64 [requests, columns]."""
        table: Ints = np.full((len(updates), self._updates.shape[1]), NONE, dtype=np.int64)
        table[:, kernel.ACCUMULATOR], table[:, kernel.KIND] = updates.accumulators, updates.kinds
        table[:, kernel.FRESH] = updates.fresh
        table[:, kernel.LAYOUT], table[:, kernel.RECORD], table[:, kernel.LINE] = layouts, 0, 0
        table[:, kernel.COUNT], table[:, kernel.DIVISOR] = updates.counts, divisors
        table[:, kernel.UPDATE_COLUMNS : kernel.UPDATE_COLUMNS + self._accumulators.held] = updates.adds
        return table

    def spill(self, accumulator: int, layout: RecordLayout, lines: Ints, arena: torch.Tensor) -> Any:
        """Copy an accumulator and its held rows to lines of the arena; return the copy's event; see `Taps.spill`."""
        copies = list(self._sums_of(accumulator, layout, int(lines[0]), arena))
        size = self._held[accumulator][0].nbytes
        for slot, line in enumerate(lines[-self._accumulators.held :].tolist()):
            source = self._held.data_ptr() + (accumulator * self._accumulators.held + slot) * size
            copies += _copies(arena.data_ptr() + line * LINE_BYTES, source, layout.raw, self._raw, layout.locals)
        return self._fetch([accumulator], copies)

    def finish(  # noqa: PLR0917 -- as for `Taps`
        self,
        ring: torch.Tensor,
        updates: Updates,
        divisors: Ints,
        layouts: Sequence[RecordLayout],
        lines: Ints,
        arena: torch.Tensor,
    ) -> Any:
        """Add the held rows of `updates` to their sums, divide, and copy these to `arena`; return the copies' event.

        Arguments are as for `Taps.finish`; `ring` holds the captured rows on the device.
        """
        # For all points: those that a layout lacks are not copied, and its number may be another layout's by now.
        table = self._table_of(updates, np.full(len(updates), NONE), divisors).astype(np.int32)
        self._launch(ring, self._transfers.to_device(torch.from_numpy(table)))
        ends = zip(updates.accumulators.tolist(), layouts, lines.tolist(), strict=True)
        copies = [
            copy for accumulator, layout, line in ends for copy in self._sums_of(accumulator, layout, line, arena)
        ]
        return self._fetch(updates.accumulators.tolist(), copies)

    def _sums_of(
        self, accumulator: int, layout: RecordLayout, line: int, arena: torch.Tensor
    ) -> Iterator[tuple[int, int, int]]:
        source = self._sums.data_ptr() + accumulator * self._sums[0].nbytes
        target = arena.data_ptr() + line * LINE_BYTES
        schemas = [self._schemas[local] for local in layout.locals]
        return _copies(target, source, record_of(schemas, REDUCED), self._reduced, layout.locals)

    def _fetch(self, accumulators: Sequence[int], copies: Sequence[tuple[int, int, int]]) -> Any:
        targets, sources, sizes = np.array(copies, dtype=np.int64).T
        event = self._transfers.fetch(self._transfers.now(), targets, sources, sizes, urgent=True)
        self._leaving |= dict.fromkeys(accumulators, event)
        return event


def _copies(
    target: int, source: int, part: RecordShape, record: RecordShape, locals_: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the copies of some points' rows out of a record of all points: target address, source address, bytes.

    Args:
        target, source: addresses of the two records.
        part: shape of the record of some points, the target.
        record: shape of the record of all points, the source.
        locals_: indices of these points in the record of all.
    """
    if part == record:
        yield target, source, record.lines * LINE_BYTES
        return
    for at, size, local in zip(part.offsets, part.sizes, locals_, strict=True):
        yield target + at, source + record.offsets[local], size


def ring_bytes(installed: Installed, sizes: TapSizes, layers: Sequence[int], device: torch.device) -> int:
    """Return the size in bytes of the ring of rows: `device_ring_bytes`, or as much as passes need.

    A pass that runs a CUDA graph has all its rows in the ring, and any other one those of a layer.

    Args:
        layers: first point of each layer, then the number of points; empty if rows cannot leave layer by layer.
    """
    if sizes.device_ring_bytes is not None:
        return sizes.device_ring_bytes
    tokens, whole = sizes.tokens, _token_bytes(installed, 0, len(installed.points))
    least = tokens * whole
    if layers:
        layer = max(_token_bytes(installed, *layer) for layer in pairwise(layers))
        least = max(min(sizes.graph_tokens, tokens) * whole, tokens * layer)
    share = int(torch.cuda.mem_get_info(device)[1] * SHARE)
    return max(least, min(2 * tokens * whole, share, RING_BYTES))


def _token_bytes(installed: Installed, first: int, stop: int) -> int:
    """Return the bytes of a token's raw rows at points [first, stop), and half as many for encoded ones."""
    points = zip(installed.schemas[first:stop], installed.kept[first:stop], strict=True)
    return record_of([schema for schema, keeps in points if keeps]).lines * LINE_BYTES * 3 // 2


def ring(lines: int, device: torch.device) -> torch.Tensor:
    """Allocate the ring of rows: uint8 [lines, LINE_BYTES].

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    """
    try:
        return torch.empty((lines, LINE_BYTES), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"the device has no room for {lines * LINE_BYTES:,} bytes of rows on their way to shared memory; "
            f"lower SteerModel(..., device_ring_bytes=) or gpu_memory_utilization=: {error}"
        ) from error
