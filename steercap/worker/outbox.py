"""One request's rows while they come in, and the parcel they become.

Number 6 and 7 in the life of a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from steercap.core.messages import LineRange, Owner, Parcel
from steercap.core.plan import CapturePlan, Plan
from steercap.core.rows import Ints, ranks, rows_selected
from steercap.core.spec import Reduction
from steercap.worker.arena import Arena
from steercap.worker.reduce import REDUCED_DTYPE, reduce_rows
from steercap.worker.tables import ABSENT, StepRows


class Outbox:
    """Rows of one sample of one request on this rank.

    Args:
        owner: whose rows.
        plan: the request.
        capture: what it keeps.
        local: index of every point of this rank among the engine's armed points, ascending.
        arena: where the rows go.
    """

    def __init__(self, owner: Owner, plan: Plan, capture: CapturePlan, local: tuple[int, ...], arena: Arena) -> None:
        self.owner = owner
        self.capture = capture
        self.limit = plan.limit
        self.failure: str | None = None
        self.writes = 0
        self._arena = arena
        self._ranks = ranks(capture.ranges, plan.limit)
        self._offsets, self._points = record_layout(capture.points, local)
        self._per_page = arena.shape.records(len(self._points)) if self._points else 0
        self._pages: list[int] = []
        self._first_lines = np.empty(0, dtype=np.int64)
        rows = int(self._ranks.max(initial=-1)) + 1
        self._positions = np.full(rows, ABSENT, dtype=np.int64)
        self._token_ids = np.full(rows, ABSENT, dtype=np.int64)
        self._reduced = False

    def place(self, start: int, first_token: int, token_ids: Ints) -> StepRows | None:
        """Find lines for the tokens of a pass that the plan selects, and label them.

        Args:
            start: position of the request's first token in this pass.
            first_token: its place in the batch.
            token_ids: ids of the request's tokens in this pass, int64 [tokens].
        """
        order = self._ranks[start : start + len(token_ids)]
        chosen = np.flatnonzero(order >= 0)
        if not len(chosen) or not self._points:
            return None
        rows = order[chosen]
        if not self._reach(int(rows[-1])):
            self.fail("the arena is full")
            return None
        self._positions[rows] = chosen + start
        self._token_ids[rows] = token_ids[chosen]
        self.writes += len(rows)
        page, slot = np.divmod(rows, self._per_page)
        lines = self._first_lines[page] + slot * len(self._points)
        return StepRows(chosen + first_token, lines, self._offsets, self.capture.before_edits)

    def fail(self, reason: str) -> None:
        """The rows cannot be trusted; the first reason is kept."""
        self.failure = self.failure or reason

    def seal(self, total: int, first: int) -> Parcel:
        """Say where the rows of the first `total` inputs are; reduce them first if the plan says so. Idempotent.

        Args:
            total: inputs of the sequence, as far as the client knows it.
            first: rows to leave out, because the client has them already.
        """
        rows = len(rows_selected(self.capture.ranges, self.limit, total))
        stored, dtype = range(first, rows), self._arena.dtype
        failure = self.failure or self._missing(rows)
        if self.capture.reduce:
            stored, dtype = range(min(rows, 1)), REDUCED_DTYPE
            if rows and self._points and not failure and not self._reduced:
                self._reduce(self.capture.reduce, rows)
        return Parcel(
            owner=self.owner,
            codec=self.capture.codec,
            points=self._points,
            lines=tuple(self._line_ranges(stored, dtype)) if not failure else (),
            stored_rows=len(stored),
            dtype=str(dtype).removeprefix("torch."),
            positions=self._positions[first:rows].tobytes(),
            token_ids=self._token_ids[first:rows].tobytes(),
            writes=self.writes,
            failure=failure,
        )

    def _line_ranges(self, rows: range, dtype: torch.dtype) -> Iterator[LineRange]:
        """The lines of these rows, page by page; rows that were never reached have none."""
        record = len(self._points) * dtype.itemsize // self._arena.dtype.itemsize
        for number, line in enumerate(self._first_lines.tolist()):
            start = max(rows.start - number * self._per_page, 0)
            stop = min(rows.stop - number * self._per_page, self._per_page)
            if start < stop:
                yield LineRange(line + start * record, (stop - start) * record)

    def free(self) -> None:
        """Give the pages back."""
        self._arena.free(self._pages)
        self._pages = []
        self._first_lines = np.empty(0, dtype=np.int64)

    def _reach(self, row: int) -> bool:
        """Have a page for `row` and all before it."""
        missing = row // self._per_page + 1 - len(self._pages)
        if missing <= 0:
            return True
        for _ in range(missing):
            page = self._arena.pages.allocate()
            if page is None:
                return False
            self._pages.append(page)
        self._first_lines = np.array([self._arena.page_line(page) for page in self._pages], dtype=np.int64)
        return True

    def _missing(self, rows: int) -> str | None:
        missing = np.flatnonzero(self._positions[:rows] == ABSENT)
        if not self._points or not len(missing):
            return None
        return f"{len(missing)} of {rows} rows were never computed, the first of them row {missing[0]}"

    def _reduce(self, reduction: Reduction, rows: int) -> None:
        """Replace the rows by their reduction, in the first page; the others are given back."""
        self._reduced = True
        reduce_rows(self._arena, self._first_lines, len(self._points), rows, reduction)
        self._arena.free(self._pages[1:])
        self._pages, self._first_lines = self._pages[:1], self._first_lines[:1]


@lru_cache(maxsize=1024)
def record_layout(points: tuple[int, ...], local: tuple[int, ...]) -> tuple[Ints, tuple[int, ...]]:
    """A record's lines on this rank.

    Returns:
        The line of every local point, ABSENT where it is not wanted (int64 [local]); and the wanted points in the
        order of their lines. Equal arguments give the same array, so that a step can tell equal layouts by identity.
    """
    wanted = tuple(index for index in local if index in set(points))
    offsets = np.array([wanted.index(index) if index in wanted else ABSENT for index in local], dtype=np.int64)
    return offsets, wanted
