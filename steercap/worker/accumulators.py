"""Bookkeeping of running reductions: which rows of a pass are added now, and which are held back.

A row cannot be taken out once it is added, so it must be known to belong to its sequence. Prompt rows do. A generated
token's row may belong to a draft that is rejected, or lie past an end that the scheduler learns of later: it is held
apart until its request has advanced far enough beyond it. A row that is computed again after a preemption was either
added before, or is held and gets replaced.

The changes to one request's rows in one pass are an update: some held rows are added, some of the pass's rows are
added, and the newest of the pass's rows are held. This module decides; the taps of each device carry it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from steercap.core.program import NONE
from steercap.core.rows import Ints
from steercap.core.spec import Reduction
from steercap.kernels.bits import LAST, MAX, SUM
from steercap.worker.step import Step

_KINDS: Final[dict[Reduction, int]] = {"sum": SUM, "mean": SUM, "max": MAX, "last": LAST}
_NONE_CROWDED: Final[Ints] = np.empty(0, dtype=np.int64)
#: Position of a slot that holds no row.
EMPTY: Final = -1


@dataclass(frozen=True)
class Updates:
    """Updates of the accumulators in one pass, one entry per request: int64 [requests] unless said otherwise.

    Args:
        accumulators: index of each request's accumulator.
        kinds: SUM, MAX or LAST.
        fresh: True where the accumulator starts empty: bool.
        added: indices in the step of the rows that are added, request by request: int64 [rows].
        counts: number of added rows of each request.
        first: index in the step of the first added row of each request, or of any row of the request if none is added.
        adds: slots of the held rows to add first, oldest first, padded with NONE: [requests, held].
        holds: index in the step of the row to hold in each slot, NONE where the slot keeps its row: [requests, held].
    """

    accumulators: Ints
    kinds: Ints
    fresh: npt.NDArray[np.bool_]
    added: Ints
    counts: Ints
    first: Ints
    adds: Ints
    holds: Ints

    def __len__(self) -> int:
        return len(self.accumulators)


class Accumulators:
    """Pool of accumulators, each the running reduction (sum, mean, max or last) of one request's captured rows.

    An ended request keeps its accumulator until the client says where its sequence ends, or another request needs it.

    Args:
        total: number of accumulators.
        lag: maximum number of positions that vLLM may compute past a sequence's end, rejected drafts included.
        held: slots of each accumulator for rows that are not added yet, since their token may still be rejected.
    """

    def __init__(self, total: int, lag: int, held: int) -> None:
        self.total, self.lag, self.held = total, lag, held
        self._free = list(range(total - 1, -1, -1))
        self._ended: dict[int, Callable[[], None]] = {}
        self._kinds: Ints = np.zeros(total, dtype=np.int64)
        self._sure: Ints = np.zeros(total, dtype=np.int64)  # positions below belong to the sequence: its prompt
        self._added: Ints = np.zeros(total, dtype=np.int64)  # rows added so far
        self._next: Ints = np.zeros(total, dtype=np.int64)  # all selected positions below are added
        self._fresh = np.zeros(total, dtype=np.bool_)
        self._positions: Ints = np.full((total, held), EMPTY, dtype=np.int64)  # position of the row in each slot

    @property
    def in_use(self) -> int:
        """Number of accumulators in use by a request."""
        return self.total - len(self._free)

    def acquire(self, reduce: Reduction, prompt_len: int) -> int | None:
        """Allocate an accumulator, spilling an ended request's if needed; return its index, None if all are busy."""
        if not self._free and self._ended:
            next(iter(self._ended.values()))()
        if not self._free:
            return None
        accumulator = self._free.pop()
        self._kinds[accumulator], self._sure[accumulator] = _KINDS[reduce], prompt_len
        self._added[accumulator] = self._next[accumulator] = 0
        self._fresh[accumulator] = True
        self._positions[accumulator] = EMPTY
        return accumulator

    def end(self, accumulator: int, spill: Callable[[], None]) -> None:
        """Mark an accumulator's request as ended; `spill` must move its reduction to the arena and release it."""
        self._ended[accumulator] = spill

    def release(self, accumulator: int) -> tuple[int, Ints]:
        """Free an accumulator.

        Returns:
            Number of rows added to it; and the position of the held row in each slot, EMPTY for none: int64 [held].
        """
        self._ended.pop(accumulator, None)
        self._free.append(accumulator)
        return int(self._added[accumulator]), self._positions[accumulator].copy()

    def finish(self, accumulators: Ints, totals: Ints) -> tuple[Updates, Ints]:
        """Compute the updates that add all held rows within their sequences; nothing is recorded as added.

        Args:
            accumulators: indices of the accumulators: int64 [accumulators].
            totals: number of input tokens of each accumulator's sequence: int64 [accumulators].

        Returns:
            The updates; and the number of rows in each accumulator after them: int64 [accumulators].
        """
        held = self._positions[accumulators]
        late = (held != EMPTY) & (held < totals[:, None])
        nothing = np.zeros(len(accumulators), dtype=np.int64)
        holds = np.full(held.shape, NONE, dtype=np.int64)
        adds = _oldest(held, late)
        kinds, fresh = self._kinds[accumulators], self._fresh[accumulators]
        updates = Updates(accumulators, kinds, fresh, nothing[:0], nothing, nothing, adds, holds)
        return updates, self._added[accumulators] + late.sum(1)

    def update(self, step: Step) -> tuple[Updates | None, Ints]:
        """Compute the updates of the accumulators in a pass, and record them as done.

        A position is sure to belong to its sequence if it is one of the prompt, or if the position `lag` behind it is
        computed too, since at most `lag` positions past a sequence's end are computed.

        - Added for good: held rows that have become sure, and then the pass's rows that are sure. A row cannot be taken
          out again, so each is added once: rows that were added before a preemption are left out.
        - Held apart: the pass's other rows. They may be of drafts that will be rejected, or lie past the end.
        - Dropped: held rows that this pass computes again; the new row is added or held in their place.
        - Kept as held: all other held rows.

        Returns:
            The updates, None if the pass has no reduced rows; and the indices, in the request table, of requests with
            more newest rows than can be held: none of these is added from here on.
        """
        if not self.in_use or not (step.accumulators != NONE).any():
            return None, _NONE_CROWDED
        rows = _Rows.of(step)
        accumulators, request = rows.accumulators, rows.request
        sure = np.maximum(self._sure[accumulators], rows.ends - self.lag)

        held = self._positions[accumulators]
        again = (held >= rows.starts[:, None]) & (held < rows.ends[:, None])
        proved = (held != EMPTY) & (held < np.minimum(sure, rows.starts)[:, None])
        adds = _oldest(held, proved)
        held = np.where(proved | again, EMPTY, held)

        new = rows.positions >= self._next[accumulators][request]
        added = new & (rows.positions < sure[request])
        counts = np.bincount(request[added], minlength=len(accumulators))
        first = rows.tokens[rows.begins]
        first[request[added][::-1]] = rows.tokens[added][::-1]  # backwards: each request's first is written last

        row, slot, crowded = _slots_for(np.flatnonzero(new & ~added), request, held == EMPTY)
        holds = np.full(held.shape, NONE, dtype=np.int64)
        holds[request[row], slot] = rows.tokens[row]
        held[request[row], slot] = rows.positions[row]

        kinds, fresh = self._kinds[accumulators], self._fresh[accumulators]
        self._fresh[accumulators] = False
        self._added[accumulators] += proved.sum(1) + counts
        self._next[accumulators] = np.maximum(self._next[accumulators], np.minimum(sure, rows.ends))
        self._positions[accumulators] = held
        updates = Updates(accumulators, kinds, fresh, rows.tokens[added], counts, first, adds, holds)
        return updates, step.requests[rows.tokens[rows.begins[crowded]]]


@dataclass(frozen=True)
class _Rows:
    """Reduced rows of a pass, request by request.

    Args:
        tokens: index of each row in the step: int64 [rows].
        positions: position of each row: int64 [rows].
        request: index of each row's request among those of the pass: int64 [rows].
        begins: index of the first row of each request: int64 [requests].
        accumulators: accumulator of each request: int64 [requests].
        starts: position of the request's first token in this pass, reduced or not: int64 [requests].
        ends: position after the request's last reduced row: int64 [requests].
    """

    tokens: Ints
    positions: Ints
    request: Ints
    begins: Ints
    accumulators: Ints
    starts: Ints
    ends: Ints

    @staticmethod
    def of(step: Step) -> _Rows:
        """Select the reduced rows of a step."""
        tokens = np.flatnonzero(step.accumulators != NONE)
        accumulators, positions = step.accumulators[tokens], step.positions[tokens]
        begins = np.flatnonzero(np.diff(accumulators, prepend=NONE))
        behind = np.append(begins, len(tokens))[1:]
        request = np.repeat(np.arange(len(begins)), behind - begins)
        starts, ends = step.firsts[tokens[begins]], positions[behind - 1] + 1
        return _Rows(tokens, positions, request, begins, accumulators[begins], starts, ends)


def _slots_for(rows: Ints, request: Ints, free: npt.NDArray[np.bool_]) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Assign a free slot to each row that is held apart.

    Args:
        rows: indices of these rows, request by request.
        request: index of the request of each row of the pass: int64 [rows].
        free: True for empty slots: bool [requests, slots].

    Returns:
        The rows that get a slot, the slot of each, and a bool per request that is True where it has too few free slots;
        such requests get none.
    """
    wanted = np.bincount(request[rows], minlength=len(free))
    crowded = wanted > free.sum(1)
    before = np.cumsum(wanted) - wanted  # rows of the requests before
    number = np.arange(len(rows)) - before[request[rows]]  # of each row among those of its request
    fits = ~crowded[request[rows]]
    rows, number = rows[fits], number[fits]
    free_first = np.argsort(~free, axis=1, kind="stable")
    return rows, free_first[request[rows], number], crowded


def _oldest(held: Ints, chosen: npt.NDArray[np.bool_]) -> Ints:
    """Return each accumulator's chosen slots by ascending `held` position, then NONE: int64 [accumulators, slots]."""
    order = np.argsort(np.where(chosen, held, np.iinfo(np.int64).max), axis=1)
    return np.where(np.take_along_axis(chosen, order, axis=1), order, NONE)
