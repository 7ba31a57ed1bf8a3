"""Table of the requests running on this rank, which determines what is captured and edited for each token of a pass.

In almost every pass, almost every request has advanced by one token, on the same page and in the same scopes. These are
looked up in one array at once, so that a pass over hundreds of requests costs a few numpy calls. The others (a prompt,
a new page, a preemption, a prefix-cache hit, drafts, the end of a selection) are processed singly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from struct import pack
from typing import Final

import numpy as np
import numpy.typing as npt

from steercap.core.messages import Owner, Wanted
from steercap.core.program import NONE
from steercap.core.rows import Ints
from steercap.kernels.bits import BEFORE, LAYOUT, MASK, SLOT
from steercap.worker.arena import Layouts
from steercap.worker.capture_buffer import CaptureBuffer
from steercap.worker.programs import Programs
from steercap.worker.steering import Slot, SteeredSample
from steercap.worker.step import (
    ACCUMULATOR,
    COLUMNS,
    COPIES,
    DEVICE,
    EDITS,
    ENCODED,
    FIRST,
    LINE,
    POSITION,
    RAW_LINES,
    REQUEST,
    STRIDE,
    TOKEN,
    BatchRows,
    Step,
)

#: Position beyond the end of every sequence.
NEVER: Final = np.iinfo(np.int64).max
#: Table column of a request whose tokens are neither captured nor edited: int64 [COLUMNS].
_IDLE: Final = np.full(COLUMNS, NONE, dtype=np.int64)
_IDLE[[STRIDE, RAW_LINES, ENCODED, COPIES, EDITS, DEVICE + MASK, DEVICE + BEFORE]] = 0


class Tracked:
    """State of one sample of a request whose rows are captured or edited.

    Args:
        owner: key of the request and number of the sample.
        capture_buffer: storage of the captured rows, None if none are captured or they were released.
        steered: steering state, None if the request is not steered.
        vectors: number and contents of the slot with the vectors that the rows' encoding needs; None if it needs none.
    """

    def __init__(
        self,
        owner: Owner,
        capture_buffer: CaptureBuffer | None,
        steered: SteeredSample | None,
        vectors: tuple[int, Slot] | None = None,
    ) -> None:
        self.owner = owner
        self.capture_buffer = capture_buffer
        self.steered = steered
        self.vectors = vectors
        self.index = NONE
        self.run_from = 0  # first position that ran according to the request table's array alone


class _Indices(dict[str, int]):
    """Dict from the runner's request id to the request's index in the table; NONE for unknown ids."""

    def __missing__(self, _request_id: str) -> int:
        return NONE


@dataclass
class SteadyDecode:
    """Progress of a series: consecutive passes of one token per request, over the same requests in the same order.

    Args:
        tracked: batch indices of the tracked requests, int64 [tracked requests].
        indices: the same requests' indices in the request table, int64 [tracked requests].
        starts: positions of all requests in the next pass, integers [requests], changed in place.
        left: number of passes that still belong to the series.
        step: step of the last pass.
        noted: True if `starts` has been copied to the request table since the last pass.
    """

    tracked: Ints
    indices: Ints
    starts: npt.NDArray[np.integer]
    left: int
    step: Step
    noted: bool = True

    def next(self, batch: BatchRows) -> Step | None:
        """Return the step of the next pass, and advance the series; None if the batch does not continue it."""
        if self.left < 1 or batch.num_tokens != len(batch.starts):
            return None
        # Between passes NumPy's code falls out of the processor's caches, so that each call here is slow.
        if batch.starts.tobytes() != self.starts.tobytes():
            return None
        self.left -= 1
        self.starts += 1
        self.noted = False
        self.step = self.step.following()
        return self.step


class RequestTable:
    """Table of the requests that run, or whose last passes are not completed yet.

    Args:
        programs: contents of the slots.
        layouts: record layouts of this rank.
    """

    def __init__(self, programs: Programs, layouts: Layouts) -> None:
        self._programs = programs
        self._layouts = layouts
        #: Prediction of each request: its tokens from position `first` up to `stop`, which is excluded, have the work
        #: that its column of `work` says, as a step's table does, but with the line of position 0; or, if it is not
        #: `busy`, none. Those below `next` were computed before, as drafts that may have been rejected.
        self._first: Ints = np.zeros(64, dtype=np.int64)
        self._next: Ints = np.zeros(64, dtype=np.int64)
        self._stop: Ints = np.zeros(64, dtype=np.int64)
        self._busy = np.zeros(64, dtype=np.bool_)
        self._work: Ints = np.full((COLUMNS, 64), NONE, dtype=np.int64)
        #: Tokens that were computed again, and the lowest of their positions, since the last `flush` of the request.
        self._again: Ints = np.zeros(64, dtype=np.int64)
        self._lowest: Ints = np.full(64, NEVER, dtype=np.int64)
        #: Lowest position at which each request's next pass can begin, where passes are scheduled ahead of the device.
        self._least: Ints = np.zeros(64, dtype=np.int64)
        #: Maximum number of positions of each request.
        self._limit: Ints = np.zeros(64, dtype=np.int64)
        self._tracked: list[Tracked | None] = [None] * len(self._next)
        self._holding = np.zeros(len(self._next), dtype=np.bool_)  # True where the request's rows are held
        #: Token id that the model read at each position of each request that keeps rows, NONE where it read none.
        #: Memory that was never written to is not resident.
        self._token_ids = np.empty((len(self._next), 256), dtype=np.int32)
        self._free = list(range(len(self._next) - 1, -1, -1))
        self._indices = _Indices()
        self._owners: dict[Owner, Tracked] = {}
        self._leaving: list[tuple[int, int]] = []  # (passes begun when it left, index)
        self._begun = self._completed = 0
        #: Names of the last pass, positions of the tracked ones, and their indices; None after a request came or left.
        self._last: tuple[tuple[str, ...], Ints, Ints] | None = None
        #: Series of passes that the last pass belongs to; None once the next pass may differ.
        self._steady: SteadyDecode | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._indices

    def __iter__(self) -> Iterator[Tracked]:
        """Iterate over the requests that run."""
        for index in self._indices.values():
            if (tracked := self._tracked[index]) is not None:
                yield tracked

    def find(self, owner: Owner) -> Tracked | None:
        """Return a request that runs or has passes that are not completed yet; None if it is unknown."""
        return self._owners.get(owner)

    def at(self, index: int) -> Tracked:
        """Return the request at an index that a step names."""
        tracked = self._tracked[index]
        assert tracked is not None, "an index is kept until every pass that names it was completed"
        return tracked

    def enter(self, request_id: str, tracked: Tracked) -> None:
        """Add a request that is scheduled for the first time, under the runner's id."""
        if not self._free:
            self._grow()
        tracked.index = self._free.pop()
        self._tracked[tracked.index] = tracked
        self._holding[tracked.index] = tracked.capture_buffer is not None
        self._indices[request_id] = tracked.index
        self._last = None
        self._owners[tracked.owner] = tracked
        for numbers in (self._first, self._next, self._stop, self._again, self._least):
            numbers[tracked.index] = 0
        self._lowest[tracked.index] = NEVER
        if tracked.steered is not None:
            self._limit[tracked.index] = tracked.steered.limit
        if (capture_buffer := tracked.capture_buffer) is not None:
            self._limit[tracked.index] = capture_buffer.limit
            if capture_buffer.limit > self._token_ids.shape[1]:
                self._widen(capture_buffer.limit)
            self._token_ids[tracked.index, : capture_buffer.limit] = NONE
            capture_buffer.token_ids = self._token_ids[tracked.index, : capture_buffer.limit]

    def leave(self, request_ids: Iterable[str]) -> None:
        """Remove requests that will not run again; passes they were in may be pending."""
        for request_id in request_ids:
            index = self._indices.pop(request_id, None)
            if index is not None:
                self._last = None
                self.flush(self.at(index))
                if (capture_buffer := self.at(index).capture_buffer) is not None:
                    capture_buffer.stop()
                self._leaving.append((self._begun, index))
        self._reuse()

    def record_token_ids(self, step: Step, token_ids: Ints) -> None:
        """Record the token ids that the model read at the kept tokens, unless their rows were released.

        Args:
            step: step of a pass, or of several passes joined; of two tokens at one position, the later one counts.
            token_ids: token id that the model read at each token of the step, int64 [tracked].
        """
        requests, positions = step.requests, step.positions
        kept = step.kept & self._holding[requests] & (positions < self._token_ids.shape[1])
        if not kept.all():
            requests, positions, token_ids = requests[kept], positions[kept], token_ids[kept]
        self._token_ids[requests, positions] = token_ids

    def within(self, step: Step) -> npt.NDArray[np.bool_]:
        """Return the mask of the tokens below the limit of their request: bool [tracked]."""
        return step.positions < self._limit[step.requests]

    def complete(self, passes: int) -> None:
        """Count the next `passes` passes, in order, as completed, and free the indices that no pending pass names."""
        self._completed += passes
        self._reuse()

    def flush(self, tracked: Tracked) -> None:
        """Report to a request's capture buffer and steering state the tokens that were handled in the array alone."""
        self._sync_positions()
        if (index := tracked.index) == NONE:
            return
        reached, again = int(self._next[index]), int(self._again[index])
        if reached <= tracked.run_from and not again:
            return
        start = min(tracked.run_from, int(self._lowest[index]))
        if tracked.capture_buffer is not None and self._work[DEVICE + LAYOUT, index] != NONE:
            rows, limit = reached - tracked.run_from + again, tracked.capture_buffer.limit
            tracked.capture_buffer.mark_computed(min(start, limit - 1), min(reached, limit), rows)
        if tracked.steered is not None:
            tracked.steered.mark_computed(start, reached)
        tracked.run_from = reached
        self._again[index], self._lowest[index] = 0, NEVER

    def stop_keeping(self, tracked: Tracked) -> None:
        """Stop capturing rows of a request; its steering goes on. The caller frees the rows' pages."""
        self.flush(tracked)
        tracked.capture_buffer = None
        if tracked.index != NONE:
            self._stop[tracked.index] = 0
            self._holding[tracked.index] = False
            self._end_steady()

    def discard_prediction(self, tracked: Tracked) -> None:
        """Discard the predicted work for a request's next tokens, which may have changed."""
        if tracked.index != NONE:
            self.flush(tracked)
            self._stop[tracked.index] = 0
            self._end_steady()

    def slots(self) -> dict[int, Slot]:
        """Return the contents of each slot in use by running requests, by slot number."""
        used: dict[int, Slot] = {}
        for tracked in self:
            if tracked.steered is not None and tracked.steered.slot is not None:
                used[tracked.steered.steering.slot] = tracked.steered.slot
            if tracked.capture_buffer is not None and tracked.vectors is not None:
                number, slot = tracked.vectors
                used[number] = slot
        return used

    # The pass

    def make_step(self, batch: BatchRows) -> Step | None:
        """Build the step of a pass: what is captured and edited, token by token; None if nothing is."""
        if not self._indices or not len(batch.request_ids):
            return None
        tracked, indices = self._find_all(tuple(batch.request_ids))
        if not len(tracked):
            return None
        if self._steady is not None:
            if batch.ahead is None and (step := self._steady.next(batch)) is not None:
                self._begun += 1
                return step
            self._end_steady()
        if (step := self._step_of(batch, tracked, indices)) is not None:
            self._begun += 1
        return step

    def _sync_positions(self) -> None:
        """Write the positions that the current series has reached into `_next`."""
        if self._steady is not None and not self._steady.noted:
            self._next[self._steady.indices] = self._steady.starts[self._steady.tracked]
            self._steady.noted = True

    def _end_steady(self) -> None:
        """End the current series, because the next pass may differ."""
        self._sync_positions()
        self._steady = None

    def _step_of(self, batch: BatchRows, tracked: Ints, indices: Ints) -> Step | None:
        """Build the step of a pass that does not continue a series; None if no token is captured or edited."""
        starts, counts = batch.starts.astype(np.int64), batch.counts.astype(np.int64)
        behind = counts.cumsum()
        first_tokens, num_tokens = behind - counts, int(behind[-1])
        if len(tracked) < len(starts):
            starts, counts, first_tokens = starts[tracked], counts[tracked], first_tokens[tracked]
        starts, lowest = self._starts(batch, tracked, indices, starts, counts)
        ends, loose = starts + counts, lowest < starts
        # Requests whose prediction covers all tokens in this pass.
        reached, within = self._next[indices], ends <= self._stop[indices]
        alike = (starts == reached) & within & ~loose
        others = [] if alike.all() else self._differing(alike, indices, starts, ends, lowest)
        if not others:
            self._next[indices] = np.maximum(self._next[indices], ends)
            step = self._alike_tokens(indices, starts, counts, first_tokens, num_tokens=num_tokens)
            if batch.ahead is not None:
                self._bound(step, indices, lowest, loose)
            elif len(step) and num_tokens == len(batch.counts) and (self._next[indices] == ends).all():
                left = int((self._stop[indices] - ends).min())
                self._steady = SteadyDecode(tracked, indices, batch.starts + 1, left, step)
            return step if len(step) else None
        self._next[indices[alike]] = np.maximum(self._next[indices[alike]], ends[alike])
        own = [numbers[alike] for numbers in (indices, starts, counts, first_tokens)]
        parts: list[Step | None] = [self._alike_tokens(*own, num_tokens=num_tokens)]
        for other in others:
            request = self.at(int(indices[other]))
            parts.append(self._work_out(request, int(starts[other]), int(first_tokens[other]), int(counts[other])))
        if not (parts := [part for part in parts if part]):
            return None
        step = Step.joined(parts)
        self._bound(step, indices, lowest, loose)
        return step

    def _starts(self, batch: BatchRows, tracked: Ints, indices: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Return where the tracked requests begin a pass, and the lowest positions at which they may: int64 [requests].

        The two are alike unless the pass is scheduled ahead of the device. If the work of a token depends on which of
        these positions it is, or a running reduction does, this waits for the device's positions.
        """
        if batch.ahead is None:
            return starts, starts
        ahead, lowest = batch.ahead[tracked], starts
        if not batch.exact:
            lowest = np.minimum(np.maximum(starts - ahead, self._least[indices]), starts)
        if not self._covers(indices, lowest, starts, starts + counts):
            starts = lowest = batch.settled().starts[tracked].astype(np.int64)
        self._least[indices] = np.where(ahead > 0, lowest + 1, starts + counts)
        return starts, lowest

    def _differing(
        self, alike: npt.NDArray[np.bool_], indices: Ints, starts: Ints, ends: Ints, lowest: Ints
    ) -> list[int]:
        """Return the places of the requests in a pass that no prediction covers; mark all others in `alike`.

        Arguments are as in `_step_of`, bool and int64 [requests].
        """
        reached, within = self._next[indices], ends <= self._stop[indices]
        repeat = (lowest < starts) | ((starts < reached) & (self._first[indices] <= starts) & within)
        # Tokens that are computed again, after drafts were rejected.
        again = indices[repeat]
        self._again[again] += np.minimum(self._next[again], ends[repeat]) - starts[repeat]
        self._lowest[again] = np.minimum(self._lowest[again], lowest[repeat])
        alike |= repeat
        others = []
        for other in (~alike).nonzero()[0].tolist():
            index = int(indices[other])
            self._predict(self.at(index), int(starts[other]))
            if ends[other] <= self._stop[index]:
                alike[other] = True
            else:
                others.append(other)
        return others

    def _covers(self, indices: Ints, lowest: Ints, starts: Ints, ends: Ints) -> bool:
        """Return whether one prediction covers each request's tokens wherever it starts, if that is not known.

        Tokens past a request's limit are treated as those before; their rows are dropped once positions are known.
        """
        stops, reduced = self._stop[indices], self._work[ACCUMULATOR, indices] != NONE
        fits = (self._first[indices] <= lowest) & (lowest <= self._next[indices]) & ~reduced
        fits &= (ends <= stops) | (stops == self._limit[indices])
        return bool((fits | (lowest == starts)).all())

    def _bound(self, step: Step, indices: Ints, lowest: Ints, loose: npt.NDArray[np.bool_]) -> None:
        """Note in a step where its requests may begin the pass, and where their rows end, if they are `loose`."""
        if loose.any() and len(step):
            bounds = np.full((2, len(self._next)), NEVER, dtype=np.int64)
            bounds[0, indices], bounds[1, indices] = lowest, np.where(loose, self._stop[indices], NEVER)
            step.bounds = bounds[:, step.requests]

    def _find_all(self, names: tuple[str, ...]) -> tuple[Ints, Ints]:
        """Return the batch indices and the table indices of the tracked requests: int64 [tracked requests] each."""
        if self._last is None or self._last[0] != names:
            _, *found = itemgetter(names[0], *names)(self._indices)  # it gives a number alone for one name
            indices = np.frombuffer(pack(f"{len(names)}q", *found), dtype=np.int64)  # in half the time of `np.array`
            tracked = (indices != NONE).nonzero()[0]
            self._last = names, tracked, indices[tracked]
            self._end_steady()
        return self._last[1:]

    def _work_out(self, request: Tracked, start: int, first_token: int, count: int) -> Step | None:
        """Build the step of one request's tokens in a pass, None if it is idle; predict the work for its next tokens.

        `start` is the position of its first token in the pass, and `first_token` that token's index in the batch.
        """
        capture_buffer, steered = request.capture_buffer, request.steered
        kept = np.zeros(count, dtype=np.bool_)
        lines: Ints = np.full(count, NONE, dtype=np.int64)
        masks = np.zeros(count, dtype=np.int32)
        if capture_buffer is not None and capture_buffer.failure is None:
            kept, lines = capture_buffer.place(start, count)
        if steered is not None:
            masks = steered.begin(start, count)
        chosen = np.flatnonzero(kept | (masks != 0))
        part = None
        if len(chosen):
            part = self._part(request, chosen, start, first_token, kept[chosen], lines[chosen], masks[chosen])
        self._predict(request, start + count)
        return part

    def _part(  # noqa: PLR0917 -- the columns of a table
        self,
        request: Tracked,
        chosen: Ints,
        start: int,
        first_token: int,
        kept: npt.NDArray[np.bool_],
        lines: Ints,
        masks: npt.NDArray[np.int32],
    ) -> Step:
        capture_buffer, steered = request.capture_buffer, request.steered
        slot = NONE if steered is None or steered.slot is None else steered.steering.slot
        slots = np.where(masks != 0, slot, NONE)
        positions = chosen + start
        return Step.of(
            self._layouts,
            requests=np.full(len(chosen), request.index),
            tokens=chosen + first_token,
            positions=positions,
            firsts=np.full(len(chosen), start),
            lines=lines,
            accumulators=np.where(kept, NONE if capture_buffer is None else capture_buffer.accumulator, NONE),
            layouts=np.where(kept, NONE if capture_buffer is None else capture_buffer.layout, NONE),
            slots=slots,
            masks=masks,
            edits=self._programs.checksums(slots, masks),
            replaced={} if steered is None else steered.replaced(positions),
        )

    def _predict(self, request: Tracked, start: int) -> None:
        """Record the work that a request's tokens from position `start` on have in common, and where it ends."""
        self.flush(request)
        capture_buffer, steered = request.capture_buffer, request.steered
        request.run_from = start
        self._end_steady()
        stop, work = NEVER, self._work[:, request.index]
        work[:] = _IDLE
        work[REQUEST] = request.index
        if capture_buffer is not None and capture_buffer.failure is None:
            stop, first = capture_buffer.ahead(start)
            if first is not None:
                layout, layouts = capture_buffer.layout, self._layouts
                work[DEVICE + LAYOUT], work[ACCUMULATOR] = layout, capture_buffer.accumulator
                work[RAW_LINES], work[COPIES] = layouts.raw_lines[layout], layouts.checksums[layout]
                work[DEVICE + BEFORE] = layouts.before[layout]
                if work[ACCUMULATOR] == NONE:
                    work[LINE], work[STRIDE], work[ENCODED] = first, layouts.lines[layout], layouts.encoded[layout]
        if steered is not None:
            reach, mask = steered.ahead(start)
            stop = min(stop, reach)
            if mask:
                slot = steered.steering.slot
                work[DEVICE + SLOT], work[DEVICE + MASK] = slot, mask
                work[EDITS] = self._programs.checksum(slot, mask)
        self._first[request.index] = self._next[request.index] = start
        self._stop[request.index] = stop
        self._busy[request.index] = max(work[DEVICE + LAYOUT], work[DEVICE + SLOT]) != NONE

    def totals(self, wanted: Iterable[Wanted]) -> Ints:
        """Return the number of tokens to compute before the wanted rows can be read: int64, by request index."""
        totals: Ints = np.zeros(len(self._next), dtype=np.int64)
        for item in wanted:
            tracked = self.find(item.owner)
            if tracked is not None and tracked.index != NONE:
                totals[tracked.index] = (
                    item.total if tracked.capture_buffer is None else tracked.capture_buffer.reads(item.total)
                )
        return totals

    def _alike_tokens(self, indices: Ints, starts: Ints, counts: Ints, tokens: Ints, *, num_tokens: int) -> Step:
        """Build the step of requests whose prediction covers all of their tokens in this pass.

        Args:
            indices: indices of the requests, int64 [requests].
            starts, counts, tokens: first position, number, and first batch index of a request's tokens: int64
                [requests].
            num_tokens: number of tokens in the batch.
        """
        busy = self._busy[indices]
        if not busy.all():
            indices, starts, counts, tokens = indices[busy], starts[busy], counts[busy], tokens[busy]
        positions = firsts = starts
        if len(counts) < num_tokens and (total := int(counts.sum())) > len(counts):
            along = np.arange(total)
            before = tokens if total == num_tokens else counts.cumsum() - counts
            positions = (starts - before).repeat(counts) + along
            tokens = along if before is tokens else (tokens - before).repeat(counts) + along
            indices, firsts = indices.repeat(counts), starts.repeat(counts)
        table = self._work.take(indices, axis=1)
        table[TOKEN], table[POSITION], table[FIRST] = tokens, positions, firsts
        table[LINE] += positions * table[STRIDE]
        return Step(table)

    def _grow(self) -> None:
        size = len(self._next)
        for name in ("_first", "_next", "_stop", "_again", "_lowest", "_least", "_limit"):  # `enter` writes the rest
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(size, dtype=np.int64)]))
        self._busy = np.concatenate([self._busy, np.zeros_like(self._busy)])
        self._work = np.concatenate([self._work, np.full_like(self._work, NONE)], axis=1)
        self._tracked += [None] * size
        self._holding = np.concatenate([self._holding, np.zeros(size, dtype=np.bool_)])
        self._move_labels(len(self._next), self._token_ids.shape[1])
        self._free = list(range(2 * size - 1, size - 1, -1))

    def _widen(self, limit: int) -> None:
        """Grow the table of token ids to `limit` positions or more."""
        self._move_labels(len(self._next), max(limit, 2 * self._token_ids.shape[1]))

    def _move_labels(self, requests: int, limit: int) -> None:
        """Move the token ids to a new array; unused entries are neither read nor written, and so take no memory."""
        self._token_ids = np.empty((requests, limit), dtype=np.int32)
        for index, tracked in enumerate(self._tracked):
            if tracked is not None and (capture_buffer := tracked.capture_buffer) is not None:
                moved = self._token_ids[index, : capture_buffer.limit]
                moved[:] = capture_buffer.token_ids
                capture_buffer.token_ids = moved

    def _reuse(self) -> None:
        """Free the indices that no pending pass names."""
        while self._leaving and self._leaving[0][0] <= self._completed:
            _, index = self._leaving.pop(0)
            tracked = self.at(index)
            if self._owners.get(tracked.owner) is tracked:
                del self._owners[tracked.owner]
            tracked.index = NONE
            if tracked.capture_buffer is not None:
                tracked.capture_buffer.token_ids = tracked.capture_buffer.token_ids.copy()
            self._tracked[index] = None
            self._free.append(index)
