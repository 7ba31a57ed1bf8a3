"""Record layouts: where in a token's record each point is, shared by all requests that keep the same points.

Number 5 in the life of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steercap.core.program import NONE
from steercap.kernels.bits import weight

#: Layouts in use at once; requests that run rarely have more than a few.
LAYOUTS: Final = 4096


@dataclass(frozen=True)
class Layout:
    """A record on this rank.

    Args:
        number: its row in the table.
        points: indices into the engine's armed points, in the order of the record's lines.
        evidence: what the copies of one token add up to if every one of them is made.
    """

    number: int
    points: tuple[int, ...]
    evidence: int


class Layouts:
    """The layouts in use.

    Args:
        local: index of every point of this rank among the engine's armed points, ascending.
    """

    def __init__(self, local: Sequence[int]) -> None:
        self._local = tuple(local)
        #: Line of every local point in a record, NONE where it is not kept: int32 [layouts, points].
        self.offsets = np.full((LAYOUTS, len(self._local)), NONE, dtype=np.int32)
        #: Whether rows are kept as they were before the edits of their point: bool [layouts].
        self.before = np.zeros(LAYOUTS, dtype=np.bool_)
        #: Rows of the table written since they were last taken away.
        self.fresh: list[int] = []
        self._known: dict[tuple[tuple[int, ...], bool], Layout] = {}
        self._users: dict[int, int] = {}
        self._free = list(range(LAYOUTS - 1, -1, -1))

    def points(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Which of the wanted points are on this rank, in the order of a record's lines."""
        if tuple(wanted) == self._local:
            return self._local
        known = set(wanted)
        return tuple(index for index in self._local if index in known)

    def acquire(self, wanted: Sequence[int], *, before_edits: bool) -> Layout | None:
        """The layout of a record, one user more; None when too many different ones are in use."""
        key = self.points(wanted), before_edits
        if key not in self._known:
            if not self._free:
                return None
            self._known[key] = self._write(self._free.pop(), *key)
        layout = self._known[key]
        self._users[layout.number] = self._users.get(layout.number, 0) + 1
        return layout

    def release(self, layout: Layout) -> None:
        """One user less."""
        self._users[layout.number] -= 1
        if not self._users[layout.number]:
            del self._users[layout.number]
            del self._known[layout.points, bool(self.before[layout.number])]
            self._free.append(layout.number)

    def _write(self, number: int, points: tuple[int, ...], before_edits: bool) -> Layout:
        lines = {point: line for line, point in enumerate(points)}
        self.offsets[number] = [lines.get(point, NONE) for point in self._local]
        self.before[number] = before_edits
        self.fresh.append(number)
        evidence = sum(weight(local) for local, point in enumerate(self._local) if point in lines)
        return Layout(number, points, evidence)
