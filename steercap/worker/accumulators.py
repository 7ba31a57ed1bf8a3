"""Reductions that run along with their requests: what of a pass is added to which of them, and what must wait.

A row is added once, and for good; so it must be known to belong to its sequence. A prompt's rows do. A generated
token's row may be that of a draft that is rejected, or lie past an end that the scheduler learns of later: it is held
apart until its request has come far enough beyond it. A row that is computed again, after a preemption, was added
before, or is held and replaced.

What happens to the rows of one request in one pass is an update: some held rows are added, some of the pass's are, and
the newest of those are held. This module decides; the taps of each device carry it out.
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
#: No row is held there.
EMPTY: Final = -1


@dataclass(frozen=True)
class Updates:
    """What one pass does to the accumulators, one row per request: int64 [requests] unless said otherwise.

    Args:
        accumulators: which accumulator.
        kinds: SUM, MAX or LAST.
        fresh: whether it begins: bool.
        added: indices in the step of the rows that are added, request by request: int64 [rows].
        counts: how many of them each request has.
        first: index in the step of the first of them, or of any row of the request if it has none.
        adds: slots of held rows that are added before, the oldest first, NONE for none: [requests, held].
        holds: index in the step of the row that each slot then holds, NONE where it keeps its own: [requests, held].
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
    """The accumulators, whose each is, and how far it has come.

    A request that has ended keeps its accumulator until the client says where its sequence ends, or another needs it.

    Args:
        total: accumulators at once.
        lag: how many positions vLLM may compute past a sequence's end, rejected drafts among them.
        held: rows that can be held apart for each.
    """

    def __init__(self, total: int, lag: int, held: int) -> None:
        self.total, self.lag, self.held = total, lag, held
        self._free = list(range(total - 1, -1, -1))
        self._ended: dict[int, Callable[[], None]] = {}
        self._kinds: Ints = np.zeros(total, dtype=np.int64)
        self._sure: Ints = np.zeros(total, dtype=np.int64)  # positions below belong to the sequence: its prompt
        self._added: Ints = np.zeros(total, dtype=np.int64)  # rows added so far
        self._next: Ints = np.zeros(total, dtype=np.int64)  # positions below are added, or not selected
        self._fresh = np.zeros(total, dtype=np.bool_)
        self._positions: Ints = np.full((total, held), EMPTY, dtype=np.int64)  # whose row each slot holds

    @property
    def in_use(self) -> int:
        """Accumulators that belong to a request."""
        return self.total - len(self._free)

    def acquire(self, reduce: Reduction, prompt_len: int) -> int | None:
        """An accumulator for a request, which may spill that of one that has ended; None if running ones have all."""
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
        """An accumulator's request has ended; `spill` puts the reduction elsewhere and releases the accumulator."""
        self._ended[accumulator] = spill

    def release(self, accumulator: int) -> tuple[int, Ints]:
        """Free an accumulator; gives how many rows it has, and the positions of those it holds, slot by slot."""
        self._ended.pop(accumulator, None)
        self._free.append(accumulator)
        return int(self._added[accumulator]), self._positions[accumulator].copy()

    def finish(self, accumulators: Ints, totals: Ints) -> tuple[Updates, Ints]:
        """Add the held rows that belong to sequences of `totals` inputs; gives how many rows each accumulator has."""
        held = self._positions[accumulators]
        late = (held != EMPTY) & (held < totals[:, None])
        nothing = np.zeros(len(accumulators), dtype=np.int64)
        holds = np.full(held.shape, NONE, dtype=np.int64)
        adds = _oldest(held, late)
        kinds, fresh = self._kinds[accumulators], self._fresh[accumulators]
        updates = Updates(accumulators, kinds, fresh, nothing[:0], nothing, nothing, adds, holds)
        return updates, self._added[accumulators] + late.sum(1)

    def update(self, step: Step) -> tuple[Updates | None, Ints]:
        """What a pass does to the accumulators, from here on as if it were done.

        A position is sure to belong to its sequence if it is one of the prompt, or if the position `lag` behind it is
        computed too, since at most `lag` positions past a sequence's end are computed.

        - Added for good: held rows that have become sure, and then the pass's rows that are sure. What was added cannot
          be taken out again, so each is added once: rows that were added before a preemption are left out.
        - Held apart: the pass's other rows. They may be of drafts that will be rejected, or lie past the end.
        - Dropped: held rows that this pass computes again; what it computes is added, or held, in their place.
        - Held on: all other held rows.

        Returns:
            The updates, None if the pass has no such rows; and the indices, in the ledger, of requests whose newest
            rows are more than can be held, none of which is added from here on.
        """
        if not (step.accumulators != NONE).any():
            return None, np.empty(0, dtype=np.int64)
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
        first[request[added][::-1]] = rows.tokens[added][::-1]  # backwards, so that the first of each is what stays

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
    """The rows of a pass that are reduced, request by request.

    Args:
        tokens: their indices in the step: int64 [rows].
        positions: of each: int64 [rows].
        request: whose it is, numbered in the order of the pass: int64 [rows].
        begins: the first row of each request: int64 [requests].
        accumulators: its accumulator: int64 [requests].
        starts: position of its first token in this pass, whether that one is reduced or not: int64 [requests].
        ends: the position behind its last row: int64 [requests].
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
        """Those of a step."""
        tokens = np.flatnonzero(step.accumulators != NONE)
        accumulators, positions = step.accumulators[tokens], step.positions[tokens]
        begins = np.flatnonzero(np.diff(accumulators, prepend=NONE))
        behind = np.append(begins, len(tokens))[1:]
        request = np.repeat(np.arange(len(begins)), behind - begins)
        starts, ends = step.firsts[tokens[begins]], positions[behind - 1] + 1
        return _Rows(tokens, positions, request, begins, accumulators[begins], starts, ends)


def _slots_for(rows: Ints, request: Ints, free: npt.NDArray[np.bool_]) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """A free slot for each row that is held apart.

    Args:
        rows: those rows, request by request.
        request: whose each row of the pass is.
        free: which slots hold nothing: bool [requests, slots].

    Returns:
        The rows that get a slot, and the slot of each; and which requests have fewer than they need, and get none.
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
    """The chosen slots of each accumulator, the oldest row first, then NONE: [accumulators, slots]."""
    order = np.argsort(np.where(chosen, held, np.iinfo(np.int64).max), axis=1)
    return np.where(np.take_along_axis(chosen, order, axis=1), order, NONE)
