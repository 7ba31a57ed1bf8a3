"""Record layouts: what is kept of a token, and where each point lies; shared by all requests that keep the same.

A layout has two shapes: that of the rows as the model computes them, which is how they wait on a device, and that of
the rows as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from steercap.core.coding import RAW, Coding
from steercap.core.program import NONE
from steercap.core.records import LINE_BYTES, RecordShape
from steercap.core.schema import PointSchema
from steercap.kernels.bits import weight
from steercap.kernels.codecs import record_of
from steercap.saes.encoder import Encoder

#: Layouts in use at once; requests that run rarely have more than a few.
LAYOUTS: Final = 4096

#: Points, and what reads their rows before they are stored; () where nothing does.
Reads: TypeAlias = "tuple[tuple[int, Encoder], ...]"


@dataclass(frozen=True)
class Form:
    """How rows are stored.

    Args:
        coding: the encoding.
        slot: of the vectors that it needs, such as directions, NONE where it needs none.
        before_edits: whether rows are those before the edits of their point.
        reads: what reads them first; a layout in use keeps it alive.
    """

    coding: Coding = RAW
    slot: int = NONE
    before_edits: bool = False
    reads: Reads = ()


@dataclass(frozen=True)
class Layout:
    """A record on this rank.

    Args:
        number: its row in the tables.
        points: indices into the engine's armed points, in the order of the record.
        locals: the same among the points of this rank.
        form: how its rows are stored.
        raw: the record of the rows as they are computed.
        stored: the record as it is stored.
    """

    number: int
    points: tuple[int, ...]
    locals: tuple[int, ...]
    form: Form
    raw: RecordShape
    stored: RecordShape


class Layouts:
    """The layouts in use, and tables of them in which a pass looks up many tokens at once.

    The last row of each table stands for no layout: `table[NONE]` is 0, or NONE.

    Args:
        local: index of every point of this rank among the engine's armed points, ascending.
        schemas: of these points.
        kept: which of them this rank keeps: others keep what is whole on every rank.
    """

    def __init__(self, local: Sequence[int], schemas: Sequence[PointSchema], kept: Sequence[bool]) -> None:
        self._local = tuple(local)
        self._kept = tuple(point for point, keeps in zip(local, kept, strict=True) if keeps)
        self._schemas = dict(zip(local, schemas, strict=True))
        size = LAYOUTS + 1
        #: Line of every local point in a record as it is computed, NONE where it is not kept: int32 [layouts, points].
        self.offsets = np.full((size, len(self._local)), NONE, dtype=np.int32)
        #: Lines of such a record: int64 [layouts].
        self.raw_lines = np.zeros(size, dtype=np.int64)
        #: Lines of a record as it is stored: int64 [layouts].
        self.lines = np.zeros(size, dtype=np.int64)
        #: Whether rows are stored in another form than they are computed in: bool [layouts].
        self.encoded = np.zeros(size, dtype=np.bool_)
        #: Whether rows are kept as they were before the edits of their point: bool [layouts].
        self.before = np.zeros(size, dtype=np.bool_)
        #: What the copies of one token add up to if all of them are made: int64 [layouts].
        self.evidence = np.zeros(size, dtype=np.int64)
        #: Rows of `offsets` written since they were last taken away.
        self.fresh: dict[int, None] = {}
        self._known: dict[tuple[tuple[int, ...], Form], Layout] = {}
        self._used: dict[int, Layout] = {}
        self._users: dict[int, int] = {}
        self._free = list(range(LAYOUTS - 1, -1, -1))

    def __getitem__(self, number: int) -> Layout:
        """A layout in use, by its number."""
        return self._used[number]

    def points(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Which of the wanted points this rank keeps, in the order of a record."""
        if tuple(wanted) == self._kept:
            return self._kept
        known = set(wanted)
        return tuple(index for index in self._kept if index in known)

    def schemas(self, points: Sequence[int]) -> list[PointSchema]:
        """Schemas of points of this rank."""
        return [self._schemas[point] for point in points]

    def acquire(self, wanted: Sequence[int], form: Form) -> Layout | None:
        """Use the layout of a record; None when too many different ones are in use."""
        key = self.points(wanted), form
        if key not in self._known:
            if not self._free:
                return None
            self._known[key] = self._write(self._free[-1], *key)
            self._free.pop()  # once it is written: what is no record takes no number
        layout = self._known[key]
        self._users[layout.number] = self._users.get(layout.number, 0) + 1
        return layout

    def release(self, layout: Layout) -> None:
        """One user less."""
        self._users[layout.number] -= 1
        if not self._users[layout.number]:
            del self._users[layout.number], self._used[layout.number]
            del self._known[layout.points, layout.form]
            self._free.append(layout.number)

    def _write(self, number: int, points: tuple[int, ...], form: Form) -> Layout:
        schemas = self.schemas(points)
        raw = record_of(schemas)
        stored = record_of(schemas, form.coding)
        lines = {point: offset // LINE_BYTES for point, offset in zip(points, raw.offsets, strict=True)}
        self.offsets[number] = [lines.get(point, NONE) for point in self._local]
        self.raw_lines[number], self.lines[number] = raw.lines, stored.lines
        self.before[number], self.encoded[number] = form.before_edits, form.coding != RAW
        locals_ = tuple(local for local, point in enumerate(self._local) if point in lines)
        self.evidence[number] = sum(map(weight, locals_))
        self.fresh[number] = None
        layout = self._used[number] = Layout(number, points, locals_, form, raw, stored)
        return layout
