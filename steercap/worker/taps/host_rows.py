"""Storage of a pass's rows on CPU: they are copied to the arena, encoded, or added to reductions.

Each class is set up before the pass, and called at every point of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float

from steercap.core.program import NONE
from steercap.core.rows import Ints, ends_of_runs
from steercap.core.schema import RAW, PointSchema
from steercap.kernels.bits import LAST, MAX, SUM, stray_rows
from steercap.kernels.codecs import ENCODINGS, dtype_of
from steercap.kernels.codecs.topk import rows_at_once, strongest_features
from steercap.kernels.reference import rows_at
from steercap.worker.accumulators import Updates
from steercap.worker.arena import Arena, Layouts, RecordLayout
from steercap.worker.programs import Programs
from steercap.worker.step import Step
from steercap.worker.taps import RowKind


class Keeping(ABC):
    """Abstract way of storing rows of one pass on CPU: raw in the arena, encoded, or added to running reductions.

    An object is set up before the pass; `take` is called at every point of it.
    """

    @abstractmethod
    def take(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
    ) -> Sequence[torch.Tensor]:
        """Store captured rows of a point (index on this rank); return batch indices of the non-finite ones."""


def _stray(tokens: torch.Tensor, rows: torch.Tensor) -> Sequence[torch.Tensor]:
    found = stray_rows(rows)
    return () if found is None else (tokens[found],)


class Copies(Keeping):
    """Storage of rows in the arena as the model computes them.

    Args:
        step: step of the pass.
        chosen: indices, in the step, of the tokens that are stored raw.
        layouts: record layouts of this rank.
        arena: arena to write to.
        schemas: schemas of the points.
    """

    def __init__(
        self, step: Step, chosen: Ints, layouts: Layouts, arena: Arena, schemas: Sequence[PointSchema]
    ) -> None:
        self._tokens = torch.from_numpy(step.tokens[chosen])
        self._arena, self._schemas = arena, schemas
        numbers = step.layouts[chosen]
        first = numbers[:1] if (numbers == numbers[0]).all() else numbers
        self._offsets: Ints = layouts.offsets[first].astype(np.int64).T
        self._lines = step.lines[chosen]
        self._complete = (self._offsets != NONE).all(axis=1).tolist()

    def take(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
    ) -> Sequence[torch.Tensor]:
        tokens, lines, offsets = self._tokens, self._lines, self._offsets[point]
        if not self._complete[point]:
            wanted = np.flatnonzero(np.broadcast_to(offsets != NONE, lines.shape))
            if not len(wanted):
                return ()
            tokens, lines, offsets = tokens[wanted], lines[wanted], np.broadcast_to(offsets, lines.shape)[wanted]
        rows = rows_at(hidden, residual, tokens)
        write_rows(self._arena, lines + offsets, ENCODINGS["raw"].encode(rows, self._schemas[point], RAW, None))
        return _stray(tokens, rows)


class KeepingEncoded(Keeping):
    """Storage of rows of one layout in the arena, in an encoding other than raw.

    Args:
        step: step of the pass.
        chosen: indices, in the step, of the tokens of this layout.
        layout: layout of their records.
        arena: arena to write to.
        schemas: schemas of the points.
        kinds: kinds of the points' rows on this rank.
        programs: contents of the slots.
        bank: vector bank.
    """

    def __init__(  # noqa: PLR0917 -- the tables of a rank
        self,
        step: Step,
        chosen: Ints,
        layout: RecordLayout,
        arena: Arena,
        schemas: Sequence[PointSchema],
        kinds: Sequence[RowKind],
        programs: Programs,
        bank: Float[torch.Tensor, "vectors bank"],
    ) -> None:
        self._tokens, self._lines = torch.from_numpy(step.tokens[chosen]), step.lines[chosen]
        self._arena, self._schemas, self._kinds, self._bank = arena, schemas, kinds, bank
        self._coding = layout.form.coding
        self._encoding = ENCODINGS[self._coding.encoding]
        self._offsets = dict(zip(layout.locals, layout.stored.offsets, strict=True))
        self._directions = programs.projections.get(layout.form.slot)
        reads = dict(layout.form.reads)
        self._reads = {local: reads[at] for local, at in zip(layout.locals, layout.points, strict=True) if at in reads}

    def take(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
    ) -> Sequence[torch.Tensor]:
        offset = self._offsets.get(point)
        if offset is None:
            return ()
        rows = rows_at(hidden, residual, self._tokens)
        write_rows(self._arena, self._lines, self._stored(rows, point), offset)
        return _stray(self._tokens, rows)

    def _stored(self, rows: torch.Tensor, point: int) -> torch.Tensor:
        """Return rows of a point, [rows, width], encoded: uint8 [rows, bytes]."""
        if (encoder := self._reads.get(point)) is not None:
            blocks = rows.split(rows_at_once(encoder, rows.shape[1]))
            return torch.cat([strongest_features(block, encoder, self._coding.k) for block in blocks])
        kind, schema = self._kinds[point], self._schemas[point]
        vectors = self._encoding.matrix(schema.width, self._coding)
        if self._directions is not None:
            vectors = self._bank[torch.from_numpy(self._directions[point])]
        if vectors is not None:
            vectors = vectors[:, kind.first : kind.first + kind.width]
        return self._encoding.encode(rows, schema, self._coding, vectors)


def write_rows(arena: Arena, lines: Ints, stored: torch.Tensor, offset: int = 0) -> None:
    """Write encoded rows, uint8 [rows, bytes], to the arena, `offset` bytes behind the start of each row's line."""
    size = stored.shape[1]
    itemsize = next(one for one in (8, 4, 2, 1) if size % one == 0 and offset % one == 0)
    numbers = stored.numpy().view(f"u{itemsize}")
    arena.windows(size, itemsize, offset)[lines] = numbers


class KeepingReduced(Keeping):
    """Addition of a pass's rows to running reductions; rows whose token is not final are held apart.

    Args:
        step: step of the pass.
        updates: updates of the accumulators in this pass.
        chosen: True for the tokens that are handled here: bool [tracked].
        layouts: record layouts of this rank.
        accumulators: accumulators to add to.
    """

    def __init__(
        self,
        step: Step,
        updates: Updates,
        chosen: npt.NDArray[np.bool_],
        layouts: Layouts,
        accumulators: HostAccumulators,
    ) -> None:
        self._parts: list[tuple[int | None, torch.Tensor, Ints, torch.Tensor, npt.NDArray[np.bool_]]] = []
        self._accumulators = accumulators
        targets, kinds = np.repeat(updates.accumulators, updates.counts), np.repeat(updates.kinds, updates.counts)
        newest = np.append(targets[1:] != targets[:-1], True)
        for kind in np.unique(kinds):
            wanted = (kinds == kind) & (newest | (kind != LAST))
            self._part(int(kind), step, updates.added[wanted], targets[wanted], chosen, layouts)
        request, slot = np.nonzero(updates.holds != NONE)
        held = updates.accumulators[request] * accumulators.slots + slot
        self._part(None, step, updates.holds[request, slot], held, chosen, layouts)

    def _part(  # noqa: PLR0917 -- the columns of a table
        self,
        kind: int | None,
        step: Step,
        rows: Ints,
        targets: Ints,
        chosen: npt.NDArray[np.bool_],
        layouts: Layouts,
    ) -> None:
        """Store tokens, targets and points of the rows that one reduction adds, or that are held (`kind` None)."""
        rows, targets = rows[chosen[rows]], targets[chosen[rows]]
        if len(rows):
            there = (layouts.offsets[step.layouts[rows]] != NONE).T
            self._parts.append((kind, torch.from_numpy(step.tokens[rows]), targets, torch.from_numpy(targets), there))

    def take(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
    ) -> Sequence[torch.Tensor]:
        strays: list[torch.Tensor] = []
        for kind, all_tokens, _, all_targets, there in self._parts:
            tokens, targets = all_tokens, all_targets
            if not there[point].all():
                wanted = torch.from_numpy(np.flatnonzero(there[point]))
                tokens, targets = tokens[wanted], targets[wanted]
            if not len(tokens):
                continue
            rows = rows_at(hidden, residual, tokens)
            if kind is None:
                held = self._accumulators.held[point]
                held[targets] = rows.to(held.dtype)
            else:
                add(self._accumulators.sums[point], targets, rows, kind)
            strays += _stray(tokens, rows)
        return strays


class HostAccumulators:
    """Running reductions of requests in host memory, for `total` accumulators with `slots` held rows each.

    Attributes:
        sums: accumulators of each point, float32 [accumulators, width].
        held: held rows of each point, [accumulators × slots, width] in the point's dtype.
    """

    def __init__(self, schemas: Sequence[PointSchema], total: int, slots: int) -> None:
        self.slots = slots
        # Zeroed pages are not resident until they are written.
        self.sums = [torch.zeros((total, schema.shard_width)) for schema in schemas]
        self.held = [torch.zeros((total * slots, schema.shard_width), dtype=dtype_of(schema)) for schema in schemas]

    @property
    def nbytes(self) -> int:
        """Bytes of all sums and held rows."""
        return sum(tensor.nbytes for tensor in (*self.sums, *self.held))

    def begin(self, updates: Updates) -> None:
        """Begin a pass's updates: empty the fresh accumulators, and add the held rows that became final."""
        for kind, empty in ((SUM, 0.0), (MAX, -np.inf), (LAST, 0.0)):
            begun = torch.from_numpy(updates.accumulators[updates.fresh & (updates.kinds == kind)])
            for sums in self.sums if len(begun) else ():
                sums[begun] = empty
        for slots in updates.adds.T:
            for kind in np.unique(updates.kinds[slots != NONE]):
                chosen = (slots != NONE) & (updates.kinds == kind)
                targets = torch.from_numpy(updates.accumulators[chosen])
                late = torch.from_numpy(updates.accumulators[chosen] * self.slots + slots[chosen])
                for sums, held in zip(self.sums, self.held, strict=True):
                    add(sums, targets, held[late], int(kind))


def add(sums: torch.Tensor, where: torch.Tensor, rows: torch.Tensor, kind: int) -> None:
    """Reduce rows, grouped by target, by `kind` (SUM, MAX or LAST) into the rows `where` of `sums`."""
    ends = ends_of_runs(where.numpy())
    if len(ends) < len(rows):
        runs = [rows[start:end] for start, end in pairwise([0, *ends.tolist()])]
        rows = torch.stack([run.amax(0) if kind == MAX else run.sum(0, dtype=sums.dtype) for run in runs])
        where = where[torch.from_numpy(ends - 1)]
    rows = rows.to(sums.dtype)
    if kind == SUM:
        sums.index_add_(0, where, rows)
    else:
        sums[where] = torch.maximum(sums[where], rows) if kind == MAX else rows
