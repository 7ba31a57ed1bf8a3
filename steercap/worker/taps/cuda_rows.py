"""Rows on the device: those that wait to be copied away, those that are encoded, and those that are reduced.

All of them lie in one ring of lines: the records of a pass as the model computes them, and behind these, where they are
stored in another form, what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import numpy as np
import torch

from steercap.core.coding import REDUCED, Coding
from steercap.core.program import NONE
from steercap.core.records import LINE_BYTES, RecordShape
from steercap.core.rows import Ints
from steercap.core.schema import PointSchema
from steercap.kernels import triton_accumulate as kernel
from steercap.kernels.codecs import ENCODINGS, record_of
from steercap.kernels.codecs.base import Alike, dtype_of
from steercap.kernels.codecs.matrices import Matrices
from steercap.worker.accumulators import Accumulators, Updates
from steercap.worker.layouts import Layout
from steercap.worker.programs import Programs
from steercap.worker.step import Step
from steercap.worker.taps.base import Installed, Kind
from steercap.worker.taps.transfers import Transfers


def typed(memory: torch.Tensor, schema: PointSchema) -> torch.Tensor:
    """Memory, uint8 [..., bytes], as elements of a point's dtype."""
    return memory.view(dtype_of(schema))


class DeviceEncoder:
    """Stores records of the ring in the encodings of their layouts, after the pass.

    Args:
        installed: the rank's points.
        programs: what each slot holds.
        bank: its vectors, float32 [vectors, bank width].
        transfers: to the device.
        tokens: most tokens of a pass.
        ahead: passes whose tables may be under way.
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
        # Without what reads rows, which is free once its layout is.
        self._known: dict[int, tuple[ref[Layout], int, list[tuple[Kind, Alike]]]] = {}
        self._matrices = Matrices()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that uploads are made from."""
        return sum(upload.nbytes for upload in self._uploads)

    def upload(self, number: int, layouts: Sequence[Layout], of: Ints, records: Ints) -> list[tuple[Layout, slice]]:
        """Tell which records are stored in another form, in one copy, layout by layout.

        Args:
            number: of the pass.
            layouts: those that occur.
            of: the number of each record's layout, int64 [records].
            records: first line of each record as it is computed, and as it is stored: int64 [records, 2].

        Returns:
            Which of the records in the upload are of each layout.
        """
        order = np.argsort(of, kind="stable")
        buffer = self._uploads[number % len(self._uploads)]
        buffer.numpy()[: len(order)] = records[order]
        self._transfers.put(self._records[: len(order)], buffer[: len(order)])
        ends = np.searchsorted(of[order], [layout.number for layout in layouts], side="right").tolist()
        return [(layout, slice(*one)) for layout, *one in zip(layouts, [0, *ends], ends, strict=False)]

    def launch(self, ring: torch.Tensor, work: Sequence[tuple[Layout, slice]]) -> None:
        """Store the records of a pass that has been launched."""
        for layout, records in work:
            encoding = ENCODINGS[layout.form.coding.encoding]
            reads = [encoder for _, encoder in layout.form.reads]
            for number, (kind, known) in enumerate(self._alike(layout)):
                alike = replace(known, reads=reads[number]) if reads else known
                matrix = self._matrix(kind, alike.coding)
                vectors = self._bank[:, kind.first : kind.first + kind.width] if matrix is None else matrix
                encoding.launch(ring, self._records[records], alike, vectors)

    def _matrix(self, kind: Kind, coding: Coding) -> torch.Tensor | None:
        """The rank's part of the matrix that an encoding makes by itself, in the dtype of the rows."""
        encoding = ENCODINGS[coding.encoding]
        if not encoding.seeded:
            return None

        def make() -> torch.Tensor:
            whole = encoding.matrix(kind.schema.width, coding)
            assert whole is not None, "a codec with a seed has a matrix"
            part = whole[:, kind.first : kind.first + kind.width].to(dtype_of(kind.schema))
            return self._transfers.there(part.contiguous())

        return self._matrices.get((kind, coding), make)

    def _alike(self, layout: Layout) -> list[tuple[Kind, Alike]]:
        """The points of a layout, those together whose rows are alike."""
        known = self._known.get(layout.number)
        if known is None or known[0]() is not layout or known[1] != self._programs.written:
            found = list(self._find_alike(layout))
            known = self._known[layout.number] = ref(layout), self._programs.written, found
        return known[2]

    def _find_alike(self, layout: Layout) -> Iterator[tuple[Kind, Alike]]:
        if layout.form.reads:
            yield from self._find_read(layout)
            return
        kinds = [self._installed.kind_of(self._installed.schemas[local]) for local in layout.locals]
        directions = self._programs.projections.get(layout.form.slot)
        raw, stored = np.array(layout.raw.offsets) // LINE_BYTES, np.array(layout.stored.offsets)
        for kind in dict.fromkeys(kinds):
            own = np.array([number for number, other in enumerate(kinds) if other == kind])
            bank_rows = None if directions is None else self._there(directions[np.array(layout.locals)[own]])
            points = self._there(np.stack([raw[own], stored[own]], axis=1))
            yield kind, Alike(kind.schema, layout.form.coding, points, bank_rows)

    def _find_read(self, layout: Layout) -> Iterator[tuple[Kind, Alike]]:
        """The points of a layout whose rows SAEs read, each by itself, in the order of these."""
        for local, raw, stored in zip(layout.locals, layout.raw.offsets, layout.stored.offsets, strict=True):
            schema = self._installed.schemas[local]
            at = self._there(np.array([[raw // LINE_BYTES, stored]], dtype=np.int64))
            yield self._installed.kind_of(schema), Alike(schema, layout.form.coding, at)

    def _there(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return self._transfers.there(torch.from_numpy(np.ascontiguousarray(values)))


@dataclass(frozen=True)
class _Group:
    """Points of a rank whose rows are alike, as accumulators hold them.

    Args:
        schema: of all of them.
        points: see `triton_accumulate.NUMBER` and what follows, on the device.
        sums, held: what is added up, and held apart, in elements: views of all of it.
    """

    schema: PointSchema
    points: torch.Tensor
    sums: torch.Tensor
    held: torch.Tensor


class DeviceAccumulators:
    """The reductions that run along with their requests.

    An accumulator is laid out like a record of all points in `encodings.reduced`; what it holds, in `encodings.raw`.

    Args:
        installed: the rank's points.
        accumulators: which are in use, and how far each has come.
        layouts: line of each point in a record, on the device.
        transfers: to and from the device.
        ahead: passes whose tables may be under way.
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
        self._leaving: dict[int, Any] = {}  # events of copies of accumulators, to be made before another begins there

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and of the rows held apart, on the device."""
        return self._sums.nbytes + self._held.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that uploads are made from."""
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
            there = self._transfers.there(torch.tensor(points, dtype=torch.int32))
            yield _Group(kind.schema, there, self._sums.view(torch.float32), held)

    def upload(self, number: int, step: Step, updates: Updates, sources: Ints, raw_lines: Ints) -> None:
        """Tell what becomes of the reductions of a pass, in one copy.

        Args:
            number: of the pass.
            step: its tracked tokens.
            updates: what it does to the reductions.
            sources: first line in the ring of each token's record, int64 [tracked].
            raw_lines: lines of a record of each layout, int64 [layouts].
        """
        buffer = self._uploads[number % len(self._uploads)]
        layouts = step.layouts[updates.first]
        table = self._table_of(updates, layouts, 1)
        table[:, kernel.LINE], table[:, kernel.RECORD] = sources[updates.first], raw_lines[layouts]
        table[:, -self._accumulators.held :] = np.where(updates.holds == NONE, NONE, sources[updates.holds])
        buffer.numpy()[: len(updates)] = table
        for accumulator in updates.accumulators[updates.fresh].tolist():
            if accumulator in self._leaving:
                self._transfers.hold(self._leaving.pop(accumulator))
        self._transfers.put(self._updates[: len(updates)], buffer[: len(updates)])

    def launch(self, ring: torch.Tensor, updates: int) -> None:
        """Carry out the first updates of the upload."""
        self._launch(ring, self._updates[:updates])

    def _launch(self, ring: torch.Tensor, updates: torch.Tensor) -> None:
        for one in self._groups:
            rows = typed(ring, one.schema)
            kernel.launch_accumulate(
                updates, one.points, one.schema.shard_width, self._layouts, one.sums, one.held, rows
            )

    def _table_of(self, updates: Updates, layouts: Ints, divisors: Ints | int) -> Ints:
        """Updates as the kernel reads them, but for the lines: int64 [requests, columns]."""
        table: Ints = np.full((len(updates), self._updates.shape[1]), NONE, dtype=np.int64)
        table[:, kernel.ACCUMULATOR], table[:, kernel.KIND] = updates.accumulators, updates.kinds
        table[:, kernel.FRESH] = updates.fresh
        table[:, kernel.LAYOUT], table[:, kernel.RECORD], table[:, kernel.LINE] = layouts, 0, 0
        table[:, kernel.COUNT], table[:, kernel.DIVISOR] = updates.counts, divisors
        table[:, kernel.UPDATE_COLUMNS : kernel.UPDATE_COLUMNS + self._accumulators.held] = updates.adds
        return table

    def spill(self, accumulator: int, layout: Layout, lines: Ints, arena: torch.Tensor) -> Any:
        """Copy an accumulator, and what it holds, to lines of the arena; see `Taps.spill`."""
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
        layouts: Sequence[Layout],
        lines: Ints,
        arena: torch.Tensor,
    ) -> Any:
        """Carry out updates of held rows alone, divide, and copy the sums; see `Taps.finish`."""
        # Of all points: those that a layout lacks are not copied, and its number may be another layout's by now.
        table = self._table_of(updates, np.full(len(updates), NONE), divisors).astype(np.int32)
        self._launch(ring, self._transfers.there(torch.from_numpy(table)))
        ends = zip(updates.accumulators.tolist(), layouts, lines.tolist(), strict=True)
        copies = [
            copy for accumulator, layout, line in ends for copy in self._sums_of(accumulator, layout, line, arena)
        ]
        return self._fetch(updates.accumulators.tolist(), copies)

    def _sums_of(
        self, accumulator: int, layout: Layout, line: int, arena: torch.Tensor
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
    target: int, source: int, part: RecordShape, whole: RecordShape, locals_: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Copies of some points' rows out of a record of all of them: to which address, from which, and how many bytes.

    Args:
        target, source: addresses of the records.
        part: the record of the points.
        whole: the record of all.
        locals_: the indices of the points in it.
    """
    if part == whole:
        yield target, source, whole.lines * LINE_BYTES
        return
    for at, size, local in zip(part.offsets, part.sizes, locals_, strict=True):
        yield target + at, source + whole.offsets[local], size
