"""Table of the requests running on this rank, which determines the work for each token of a pass.

In almost every pass, almost every request has advanced by one token, on the same page and in the same scopes. All
of these are looked up in one array at once, so that a pass over hundreds of requests costs a few numpy calls. The
others (a prompt, a new page, a preemption, a prefix-cache hit, drafts, the end of a selection) are processed one by
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from steercap.core.messages import Owner, Wanted
from steercap.core.program import NONE
from steercap.core.rows import Ints
from steercap.worker.capture_buffer import CaptureBuffer
from steercap.worker.layouts import Layouts
from steercap.worker.programs import Programs
from steercap.worker.steering import Slot, SteeredSample
from steercap.worker.step import BatchRows, SteadyDecode, Step

#: Columns of the state of a request. They hold for the positions from NEXT up to STOP, STOP excluded.
#: The line of position p is LINE + p × STRIDE: NONE and 0 where no row goes to the arena.
_NEXT, _STOP, _BUSY, _INDEX, _LINE, _STRIDE, _ACCUMULATOR, _LAYOUT, _SLOT, _MASK, _COPIES, _EDITS, _FIELDS = range(13)
#: A position that no sequence reaches.
NEVER: Final = np.iinfo(np.int64).max


class Tracked:
    """State of one sample of a request whose rows are kept or edited.

    Args:
        owner: key of the request and number of the sample.
        capture_buffer: storage of its rows, None if none are kept or they were released.
        steered: its steering state, None if it is not steered.
        vectors: number and contents of the slot with the vectors that its encoding needs; None if it needs none.
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


class RequestTable:
    """Table of the requests that run, or whose last passes are not completed yet.

    Args:
        programs: contents of the slots.
        layouts: record layouts of this rank.
    """

    def __init__(self, programs: Programs, layouts: Layouts) -> None:
        self._programs = programs
        self._layouts = layouts
        self._state: Ints = np.zeros((64, _FIELDS), dtype=np.int64)
        self._tracked: list[Tracked | None] = [None] * len(self._state)
        self._holding = np.zeros(len(self._state), dtype=np.bool_)  # True where the request's rows are held
        #: Token id that the model read at each position of each request that keeps rows, NONE where it read none.
        #: Memory that was never written to is not resident.
        self._token_ids = np.empty((len(self._state), 256), dtype=np.int32)
        self._free = list(range(len(self._state) - 1, -1, -1))
        self._indices: dict[str, int] = {}
        self._owners: dict[Owner, Tracked] = {}
        self._leaving: list[tuple[int, int]] = []  # (passes begun when it left, index)
        self._begun = self._completed = 0
        #: Names of the last pass, positions of the tracked ones, and their indices; None after a request came or left.
        self._last: tuple[tuple[str, ...], Ints, Ints] | None = None
        #: Series of passes that the last pass belongs to; None once the next pass may differ.
        self._series: SteadyDecode | None = None

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
        """Add a request that is scheduled for the first time."""
        if not self._free:
            self._grow()
        tracked.index = self._free.pop()
        self._tracked[tracked.index] = tracked
        self._holding[tracked.index] = tracked.capture_buffer is not None
        self._indices[request_id] = tracked.index
        self._last = None
        self._owners[tracked.owner] = tracked
        self._state[tracked.index] = 0
        if (capture_buffer := tracked.capture_buffer) is not None:
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

    def label(self, requests: Ints, positions: Ints, kept: npt.NDArray[np.bool_], token_ids: Ints) -> None:
        """Record the token ids that the model read at the kept tokens of passes, unless their rows were released.

        Args:
            requests, positions, kept: those of the steps' tokens, in their order: where two are of the same position,
                the later one counts.
            token_ids: those that the model read.
        """
        kept = kept & self._holding[requests]
        self._token_ids[requests[kept], positions[kept]] = token_ids[kept]

    def complete(self, passes: int) -> None:
        """Count the next passes, in their order, as completed."""
        self._completed += passes
        self._reuse()

    def flush(self, tracked: Tracked) -> None:
        """Report to a request the tokens that ran according to the request table's array alone."""
        reached = NONE if tracked.index == NONE else int(self._state[tracked.index, _NEXT])
        if reached <= tracked.run_from:
            return
        if tracked.capture_buffer is not None and self._state[tracked.index, _LAYOUT] != NONE:
            tracked.capture_buffer.ran(tracked.run_from, reached)
        if tracked.steered is not None:
            tracked.steered.ran(tracked.run_from, reached)
        tracked.run_from = reached

    def forget_rows(self, tracked: Tracked) -> None:
        """Drop the rows of a request that were released; only its steering is left, if it has any."""
        self.flush(tracked)
        tracked.capture_buffer = None
        if tracked.index != NONE:
            self._state[tracked.index, _STOP] = 0
            self._holding[tracked.index] = False
            self._series = None

    def look_again(self, tracked: Tracked) -> None:
        """Discard the prediction of a request's next tokens, which may not hold any more."""
        if tracked.index != NONE:
            self.flush(tracked)
            self._state[tracked.index, _STOP] = 0
            self._series = None

    def slots(self) -> dict[int, Slot]:
        """Return the slots in use by running requests, and the contents of each."""
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
        """Build the step of a pass: the work for each of its tracked tokens; None if there is none."""
        if not self._indices:
            return None
        tracked, indices = self._find_all(tuple(batch.request_ids))
        if not len(tracked):
            return None
        if self._series is not None and (step := self._series.next(batch)) is not None:
            self._state[indices, _NEXT] = self._series.starts
        elif (step := self._step_of(batch, tracked, indices)) is None:
            return None
        self._begun += 1
        return step

    def _step_of(self, batch: BatchRows, tracked: Ints, indices: Ints) -> Step | None:
        """Build the step of a pass that need not be like the one before it."""
        starts, counts = batch.starts, batch.counts
        behind = counts.cumsum()
        first_tokens, num_tokens = behind - counts, int(behind[-1])
        if len(tracked) < len(starts):
            starts, counts, first_tokens = starts[tracked], counts[tracked], first_tokens[tracked]
        ends, state = starts + counts, self._state[indices]
        # Requests of which their state covers all tokens in this pass.
        alike = (starts == state[:, _NEXT]) & (ends <= state[:, _STOP])
        unlike = [] if alike.all() else (~alike).nonzero()[0].tolist()
        for other in unlike:
            index = int(indices[other])
            self._look_ahead(self.at(index), int(starts[other]))
            state[other] = self._state[index]
            alike[other] = ends[other] <= state[other, _STOP]
        if not unlike or alike.all():
            self._state[indices, _NEXT] = ends
            step = self._alike_tokens(state, starts, counts, first_tokens, num_tokens)
            if len(step) and num_tokens == len(batch.counts):
                self._series = SteadyDecode(tracked, starts + 1, int((state[:, _STOP] - starts).min()) - 1, step)
            return step if len(step) else None
        self._state[indices[alike], _NEXT] = ends[alike]
        own = (numbers[alike] for numbers in (state, starts, counts, first_tokens))
        parts = [self._alike_tokens(*own, num_tokens)]
        for other in (~alike).nonzero()[0].tolist():
            request = self.at(int(indices[other]))
            part = self._work_out(request, int(starts[other]), int(first_tokens[other]), int(counts[other]))
            if part is not None:
                parts.append(part)
        parts = [part for part in parts if len(part)]
        return Step.joined(parts) if parts else None

    def _find_all(self, names: tuple[str, ...]) -> tuple[Ints, Ints]:
        """Return the places in a batch of the requests that are tracked, and their indices in the table."""
        if self._last is None or self._last[0] != names:
            found = map(self._indices.get, names, repeat(NONE))
            indices: Ints = np.fromiter(found, dtype=np.int64, count=len(names))
            tracked = (indices != NONE).nonzero()[0]
            self._last = names, tracked, indices[tracked]
            self._series = None
        return self._last[1:]

    def _work_out(self, request: Tracked, start: int, first_token: int, count: int) -> Step | None:
        """Build the step of one request's tokens in a pass, and predict its next ones."""
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
        self._look_ahead(request, start + count)
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
        size = len(chosen)
        layouts = np.where(kept, NONE if capture_buffer is None else capture_buffer.layout, NONE)
        slot = NONE if steered is None or steered.slot is None else steered.steering.slot
        slots = np.where(masks != 0, slot, NONE)
        positions = chosen + start
        replaced = {} if steered is None else steered.replaced(positions)
        return Step(
            requests=np.full(size, request.index),
            tokens=chosen + first_token,
            positions=positions,
            firsts=np.full(size, start),
            lines=lines,
            strides=np.where(lines == NONE, 0, self._layouts.lines[layouts]),
            accumulators=np.where(kept, NONE if capture_buffer is None else capture_buffer.accumulator, NONE),
            layouts=layouts,
            slots=slots,
            masks=masks,
            copies=self._layouts.checksums[layouts],
            edits=self._programs.checksums(slots, masks),
            replaced=replaced,
        )

    def _look_ahead(self, request: Tracked, start: int) -> None:
        """Record the state that the tokens from `start` on have in common, and the position where it ends."""
        self.flush(request)
        capture_buffer, steered = request.capture_buffer, request.steered
        request.run_from = start
        stop, line, stride, accumulator, layout, copies = NEVER, NONE, 0, NONE, NONE, 0
        if capture_buffer is not None and capture_buffer.failure is None:
            stop, first = capture_buffer.ahead(start)
            if first is not None:
                accumulator, layout = capture_buffer.accumulator, capture_buffer.layout
                copies = int(self._layouts.checksums[layout])
                if accumulator == NONE:
                    line, stride = first, int(self._layouts.lines[layout])
        slot, mask, edits = NONE, 0, 0
        if steered is not None:
            reach, mask = steered.ahead(start)
            stop = min(stop, reach)
            if mask:
                slot = steered.steering.slot
                edits = self._programs.checksum(slot, mask)
        self._series = None
        busy, index = layout != NONE or mask != 0, request.index
        self._state[index] = (
            start, stop, busy, index, line, stride, accumulator, layout, slot, mask, copies, edits,
        )  # fmt: skip

    def totals(self, wanted: Iterable[Wanted]) -> Ints:
        """Return the tokens to compute before what is wanted of each request can be read: int64 [requests]."""
        totals: Ints = np.zeros(len(self._state), dtype=np.int64)
        for item in wanted:
            tracked = self.find(item.owner)
            if tracked is not None and tracked.index != NONE:
                totals[tracked.index] = (
                    item.total if tracked.capture_buffer is None else tracked.capture_buffer.reads(item.total)
                )
        return totals

    @staticmethod
    def _alike_tokens(state: Ints, starts: Ints, counts: Ints, tokens: Ints, num_tokens: int) -> Step:
        """Build the step of requests whose tokens in this pass are all covered by their state.

        Args:
            state: state of each request, from the first of these tokens on: int64 [requests, fields].
            starts, counts, tokens: position, number, and first place in the batch of these tokens: int64 [requests].
            num_tokens: number of tokens in the batch.
        """
        if not state[:, _BUSY].all():
            busy = state[:, _BUSY] != 0
            state, starts, counts, tokens = state[busy], starts[busy], counts[busy], tokens[busy]
        positions = firsts = starts
        if len(counts) < num_tokens and (total := int(counts.sum())) > len(counts):
            along, before = np.arange(total), counts.cumsum() - counts
            positions = (starts - before).repeat(counts) + along
            tokens = along if total == num_tokens else (tokens - before).repeat(counts) + along
            state = state.repeat(counts, axis=0)
            firsts = state[:, _NEXT]
        strides = state[:, _STRIDE]
        return Step(
            requests=state[:, _INDEX],
            tokens=tokens,
            positions=positions,
            firsts=firsts,
            lines=state[:, _LINE] + positions * strides,
            strides=strides,
            accumulators=state[:, _ACCUMULATOR],
            layouts=state[:, _LAYOUT],
            slots=state[:, _SLOT],
            masks=state[:, _MASK].astype(np.int32),
            copies=state[:, _COPIES],
            edits=state[:, _EDITS],
            replaced={},
        )

    def _grow(self) -> None:
        size = len(self._state)
        self._state = np.concatenate([self._state, np.zeros_like(self._state)])
        self._tracked += [None] * size
        self._holding = np.concatenate([self._holding, np.zeros(size, dtype=np.bool_)])
        self._move_labels(len(self._state), self._token_ids.shape[1])
        self._free = list(range(2 * size - 1, size - 1, -1))

    def _widen(self, limit: int) -> None:
        """Grow the table of token ids to `limit` positions or more."""
        self._move_labels(len(self._state), max(limit, 2 * self._token_ids.shape[1]))

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
