"""Layouts of a token's record: which points it keeps, and the offset of each; shared by requests that keep the same.

A layout has two shapes: that of the raw rows as the model computes them, which wait on the device, and that of
the rows as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from steercap.core.program import NONE
from steercap.core.schema import LINE_BYTES, RAW, Coding, PointSchema, RecordShape
from steercap.kernels.bits import weight
from steercap.kernels.codecs import record_of
from steercap.saes.encoder import Encoder

#: Maximum layouts in use at once; running requests rarely need more than a few.
LAYOUTS: Final = 4096

#: Points, and the SAE encoder that reads each one's rows before they are stored; () if there is none.
Reads: TypeAlias = "tuple[tuple[int, Encoder], ...]"


@dataclass(frozen=True)
class Form:
    """Storage form of rows: encoding, vectors and readers.

    Args:
        coding: the encoding.
        slot: slot of the vectors that the encoding needs, such as directions; NONE if it needs none.
        before_edits: True to keep rows as they were before the edits of their point.
        reads: SAE encoders that read the rows first; a layout in use keeps them alive.
    """

    coding: Coding = RAW
    slot: int = NONE
    before_edits: bool = False
    reads: Reads = ()


@dataclass(frozen=True)
class RecordLayout:
    """Layout of a token's record on this rank.

    Args:
        number: index of the layout in the tables.
        points: indices into the engine's armed points, in the order of the record.
        locals: the same points, as indices among the points of this rank.
        form: storage form of its rows.
        raw: shape of the record of raw rows, as they are computed.
        stored: shape of the record as it is stored.
    """

    number: int
    points: tuple[int, ...]
    locals: tuple[int, ...]
    form: Form
    raw: RecordShape
    stored: RecordShape


class Layouts:
    """Registry of the layouts in use, with tables for looking up many tokens at once.

    The last row of each table stands for no layout: `table[NONE]` is 0, or NONE.

    Args:
        local: index of every point of this rank among the engine's armed points, ascending.
        schemas: schemas of these points.
        kept: True for the points whose rows this rank keeps; rows that all ranks hold whole are kept by one.
    """

    def __init__(self, local: Sequence[int], schemas: Sequence[PointSchema], kept: Sequence[bool]) -> None:
        self._local = tuple(local)
        self._kept = tuple(point for point, keeps in zip(local, kept, strict=True) if keeps)
        self._schemas = dict(zip(local, schemas, strict=True))
        size = LAYOUTS + 1
        #: Line of every local point in a raw record, NONE where it is not kept: int32 [layouts, points].
        self.offsets = np.full((size, len(self._local)), NONE, dtype=np.int32)
        #: Lines of a raw record: int64 [layouts].
        self.raw_lines = np.zeros(size, dtype=np.int64)
        #: Lines of a stored record: int64 [layouts].
        self.lines = np.zeros(size, dtype=np.int64)
        #: True where rows are stored in another form than they are computed in: bool [layouts].
        self.encoded = np.zeros(size, dtype=np.bool_)
        #: True where rows are kept as they were before the edits of their point: bool [layouts].
        self.before = np.zeros(size, dtype=np.bool_)
        #: Expected checksum of one token's copies, if all of them are made: int64 [layouts].
        self.checksums = np.zeros(size, dtype=np.int64)
        #: Numbers of layouts written to `offsets` since the taps last read them.
        self.fresh: dict[int, None] = {}
        self._known: dict[tuple[tuple[int, ...], Form], RecordLayout] = {}
        self._used: dict[int, RecordLayout] = {}
        self._users: dict[int, int] = {}
        self._free = list(range(LAYOUTS - 1, -1, -1))

    def __getitem__(self, number: int) -> RecordLayout:
        """Return a layout in use, by its number."""
        return self._used[number]

    def points(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Select the wanted points that this rank keeps, in the order of a record."""
        if tuple(wanted) == self._kept:
            return self._kept
        known = set(wanted)
        return tuple(index for index in self._kept if index in known)

    def schemas(self, points: Sequence[int]) -> list[PointSchema]:
        """Return the schemas of points of this rank."""
        return [self._schemas[point] for point in points]

    def acquire(self, wanted: Sequence[int], form: Form) -> RecordLayout | None:
        """Return the layout of a record and count one more user of it; None if no number is free for a new layout."""
        key = self.points(wanted), form
        if key not in self._known:
            if not self._free:
                return None
            self._known[key] = self._write(self._free[-1], *key)
            self._free.pop()  # only now: a failed write must not use up a number
        layout = self._known[key]
        self._users[layout.number] = self._users.get(layout.number, 0) + 1
        return layout

    def release(self, layout: RecordLayout) -> None:
        """Remove one user of a layout; drop the layout with its last user."""
        self._users[layout.number] -= 1
        if not self._users[layout.number]:
            del self._users[layout.number], self._used[layout.number]
            del self._known[layout.points, layout.form]
            self._free.append(layout.number)

    def _write(self, number: int, points: tuple[int, ...], form: Form) -> RecordLayout:
        schemas = self.schemas(points)
        raw = record_of(schemas)
        stored = record_of(schemas, form.coding)
        lines = {point: offset // LINE_BYTES for point, offset in zip(points, raw.offsets, strict=True)}
        self.offsets[number] = [lines.get(point, NONE) for point in self._local]
        self.raw_lines[number], self.lines[number] = raw.lines, stored.lines
        self.before[number], self.encoded[number] = form.before_edits, form.coding != RAW
        locals_ = tuple(local for local, point in enumerate(self._local) if point in lines)
        self.checksums[number] = sum(map(weight, locals_))
        self.fresh[number] = None
        layout = self._used[number] = RecordLayout(number, points, locals_, form, raw, stored)
        return layout
