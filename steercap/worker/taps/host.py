"""The taps on CPU: plain PyTorch over host tensors sized by the step, rows written straight into the shared arena.

Number 5 in the life of a request. A step is over when its pass is, so it is heard of at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int

from steercap.core.program import NONE, RESPONSE_NUMBERS, Configuration, Response
from steercap.core.rows import Ints, ends_of_runs
from steercap.kernels.bits import JOINED, LAST, MAX, MEASURES, READS, RELATIVE, REPLACES, RESTORES, SUM, USED, weight
from steercap.kernels.finite import overflows_later
from steercap.kernels.reference import Column, copy_row, copy_rows, edit_stream
from steercap.worker.arena import Arena
from steercap.worker.batch import BatchRows
from steercap.worker.layouts import Layouts
from steercap.worker.programs import Programs
from steercap.worker.step import Step, Witness
from steercap.worker.tallies import Moves
from steercap.worker.taps.base import Taps, TapSizes

#: The bits of an entry's kind that a column keeps, token by token.
_BITS: Final = {
    "used": USED,
    "reads": READS,
    "relative": RELATIVE,
    "replaces": REPLACES,
    "joined": JOINED,
    "measures": MEASURES,
    "restores": RESTORES,
}


class HostTaps(Taps):
    """The taps of a rank that computes on CPU."""

    def __init__(self, points: Sequence[int], width: int, sizes: TapSizes) -> None:
        super().__init__(points, width, sizes)
        # Zeroed pages are not resident until they are written.
        self._bank = torch.zeros((max(sizes.bank_rows, 1), width), dtype=torch.float32)
        self._edits = _Edits(self.programs)
        self._copying = [_Copies(), _Copies()]  # of rows before their edits, and after
        self._projecting = [_Projections(), _Projections()]  # of rows before their edits, and after
        self._numbers = torch.zeros(0)  # the arena, as float32
        self._line_numbers = 0
        self._sums = torch.zeros((0, width))
        self._held = torch.zeros((0, width))
        self._adding = [_Additions(), _Additions()]  # of rows before their edits, and after
        self._fired: Ints = np.zeros(len(self.points), dtype=np.int64)
        self._misfit: str | None = None
        self._nonfinite: list[tuple[int, torch.Tensor]] = []  # points, and places in the batch of rows kept there
        self._num_tokens = 0
        self._labels: tuple[Ints, Ints] = (self._fired[:0], self._fired[:0])
        self._done: list[tuple[Step, Witness]] = []

    def use(self, arena: Arena) -> None:
        super().use(arena)
        self._numbers = arena.lines.view(-1).view(torch.float32)
        self._line_numbers = arena.shape.line_bytes // self._numbers.itemsize
        lines = self.tallies.total * len(self.points)
        self._sums = torch.zeros((lines, self.width), dtype=torch.float32)
        self._held = torch.zeros((lines * self.tallies.held, self.width), dtype=arena.dtype)

    def configure(self, slot: int, configuration: Configuration, places: Sequence[Sequence[int]]) -> None:
        self.programs.configure(slot, configuration, places)

    def put(self, places: Sequence[int], vectors: Float[torch.Tensor, "rows width"]) -> None:
        self._bank[torch.tensor(places)] = vectors

    def open(self, step: Step, batch: BatchRows, moves: Moves | None) -> str | None:
        self._fired[:] = 0
        self._misfit = None
        self._nonfinite = []
        self._num_tokens = int(batch.counts.sum())
        tokens = torch.from_numpy(step.tokens)
        self._labels = _host(batch.token_ids, tokens), _host(batch.positions, tokens)
        before = step.kept & self.layouts.before[step.layouts]
        drained = (step.lines != NONE) & (step.projections == NONE)
        for copying, chosen in zip(self._copying, (before, ~before), strict=True):
            copying.fill(step, np.flatnonzero(chosen & drained), self.layouts)
        for projecting, chosen in zip(self._projecting, (before, ~before), strict=True):
            projecting.fill(step, chosen, self.layouts, self.programs, self._line_numbers)
        if moves is not None:
            self._begin(moves)
        for adding, chosen in zip(self._adding, (before, ~before), strict=True):
            adding.fill(step, moves, chosen, self.layouts, self.tallies.held)
        self._edits.fill(step)
        self.open_step = step
        return None

    def close(self, failure: str | None) -> None:
        step, self.open_step = self.open_step, None
        if step is not None:
            failure = failure or self._misfit or self._misfires()
            self._done.append((step, self._witness(step, failure)))

    def _witness(self, step: Step, failure: str | None) -> Witness:
        nonfinite: Ints = np.full(len(step), NONE, dtype=np.int64)
        for point, tokens in reversed(self._nonfinite):  # the first point is written last
            nonfinite[np.searchsorted(step.tokens, tokens.numpy())] = point
        edits, overflowed = self._edits.made(step)
        return Witness(*self._labels, edits, step.copies, overflowed, nonfinite, failure)

    def _begin(self, moves: Moves) -> None:
        """Empty the tallies that begin, and add what was held of the others."""
        sums = self._sums.view(self.tallies.total, len(self.points), self.width)
        held = self._held.view(self.tallies.total, self.tallies.held, len(self.points), self.width)
        for kind, empty in ((SUM, 0.0), (MAX, -inf), (LAST, 0.0)):
            sums[torch.from_numpy(moves.places[moves.fresh & (moves.kinds == kind)])] = empty
        for slots in moves.adds.T:
            for kind in np.unique(moves.kinds[slots != NONE]):
                chosen = (slots != NONE) & (moves.kinds == kind)
                places = torch.from_numpy(moves.places[chosen])
                _add(sums, places, held[places, torch.from_numpy(slots[chosen])], kind)

    def spill(self, place: int, record: int, lines: Ints) -> Any:
        assert self.arena is not None
        sums = self._sums[place * len(self.points) :][:record].view(self.arena.dtype).view(-1, self.width)
        held = self._held.view(self.tallies.total, self.tallies.held, len(self.points), self.width)[place]
        self.arena.lines[lines[0] : lines[0] + len(sums)] = sums
        for rows, line in zip(held, lines[-self.tallies.held :], strict=True):
            self.arena.lines[line : line + record] = rows[:record]

    def finish(self, moves: Moves, divisors: Ints, records: Ints, lines: Ints) -> Any:
        assert self.arena is not None
        self._begin(moves)
        sums = self._sums.view(self.tallies.total, len(self.points), self.width)
        for place, divisor, record, line in zip(
            moves.places.tolist(), divisors.tolist(), records.tolist(), lines.tolist(), strict=True
        ):
            rows = (sums[place, :record] / divisor).view(self.arena.dtype).view(-1, self.width)
            self.arena.lines[line : line + len(rows)] = rows

    def landed(self, mark: Any) -> None:
        """It is there when `spill` or `finish` returns."""

    @property
    def unheard(self) -> Sequence[Step]:
        return [step for step, _ in self._done]

    def heard(self, through: Step | None = None) -> Iterator[tuple[Step, Witness]]:  # noqa: ARG002 -- all have run
        while self._done:
            yield self._done.pop(0)

    def on_tap(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: Int[torch.Tensor, " 1"],
    ) -> None:
        if self.open_step is None:
            return
        at = int(point)
        self._fired[at] += 1
        if len(hidden) < self._num_tokens or hidden.shape[-1] != self.width:
            self._misfit = f"tap {at} saw {tuple(hidden.shape)} for {self._num_tokens} tokens"
            return
        self._keep(0, hidden, residual, at)
        if self._edits.wanted(at, hidden.dtype):
            self._edits.apply(hidden, residual, at, self._bank)
        self._keep(1, hidden, residual, at)

    def _keep(self, when: int, hidden: torch.Tensor, residual: torch.Tensor | None, point: int) -> None:
        """Take the rows of one point that are wanted before its edits (0), or after them (1)."""
        if self.arena is None:
            return
        for strays in (
            self._copying[when].copy(hidden, residual, point, self.arena.lines),
            self._projecting[when].project(hidden, residual, point, self._bank, self._numbers),
            self._adding[when].add(hidden, residual, point, self._sums, self._held),
        ):
            self._nonfinite += [(point, tokens) for tokens in strays]

    def _misfires(self) -> str | None:
        wrong = np.flatnonzero(self._fired != 1)
        if len(wrong):
            return f"taps of points {[self.points[tap] for tap in wrong]} fired {self._fired[wrong]} times, not once"
        return None


class _Copies:
    """The rows that a pass copies: a place in the batch, and a line for each point."""

    def __init__(self) -> None:
        self._tokens = self._lines = torch.empty(0, dtype=torch.int64)
        self._offsets = torch.empty((0, 0), dtype=torch.int64)
        self._complete: list[bool] = []

    def fill(self, step: Step, chosen: Ints, layouts: Layouts) -> None:
        """Take in the chosen tokens of a pass."""
        self._tokens = torch.from_numpy(step.tokens[chosen])
        if not len(chosen):
            return
        self._lines = torch.from_numpy(step.lines[chosen])
        numbers = step.layouts[chosen]
        if (numbers == numbers[0]).all():
            table = layouts.offsets[numbers[0]].astype(np.int64)[:, None]
            self._offsets = torch.from_numpy(table).expand(-1, len(chosen))
        else:
            table = layouts.offsets[numbers].astype(np.int64).T
            self._offsets = torch.from_numpy(table)
        self._complete = (table != NONE).all(axis=1).tolist()

    def copy(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
        lines: Float[torch.Tensor, "lines width"],
    ) -> Sequence[torch.Tensor]:
        """Copy the rows wanted at one point to their lines; gives the tokens of those that are not finite."""
        if not len(self._tokens):
            return ()
        tokens, targets = self._wanted(point)
        if not len(tokens):
            return ()
        if len(tokens) == 1:
            stray = copy_row(hidden, residual, int(tokens), lines[int(targets)])
        else:
            stray = copy_rows(hidden, residual, tokens, targets, lines)
        return () if stray is None else (tokens[stray],)

    def _wanted(self, point: int) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = self._offsets[point]
        if self._complete[point]:
            return self._tokens, self._lines + offsets
        wanted = torch.nonzero(offsets >= 0).flatten()
        return self._tokens[wanted], (self._lines + offsets)[wanted]


class _Projections:
    """The rows that a pass projects: slot by slot, places in the batch, and where the numbers of each point go."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor, Ints]] = []

    def fill(self, step: Step, chosen: npt.NDArray[np.bool_], layouts: Layouts, programs: Programs, line: int) -> None:
        """Take in those of the chosen tokens of a pass whose rows are projected; a line holds `line` numbers."""
        self._parts = []
        wanted = chosen & (step.projections != NONE)
        if not wanted.any():
            return
        for slot in np.unique(step.projections[wanted]).tolist():
            own = np.flatnonzero(wanted & (step.projections == slot))
            places = programs.projections[slot]
            offsets = layouts.offsets[step.layouts[own]].astype(np.int64).T
            # The numbers of a point follow those of the point before.
            numbers = step.lines[own] * line + offsets * places.shape[1]
            where = torch.from_numpy(np.where(offsets == NONE, NONE, numbers))
            self._parts.append((torch.from_numpy(step.tokens[own]), where, places))

    def project(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
        bank: Float[torch.Tensor, "vectors width"],
        numbers: Float[torch.Tensor, " numbers"],
    ) -> Sequence[torch.Tensor]:
        """Write down what the rows of one point are along its directions; gives the tokens of those not finite."""
        strays = []
        for all_tokens, where, all_places in self._parts:
            wanted = where[point] != NONE
            tokens, first, places = all_tokens[wanted], where[point][wanted], torch.from_numpy(all_places[point])
            if not len(tokens):
                continue
            rows = torch.empty((len(tokens), hidden.shape[-1]), dtype=hidden.dtype)
            stray = copy_rows(hidden, residual, tokens, torch.arange(len(tokens)), rows)
            numbers[first[:, None] + torch.arange(len(places))] = rows.float() @ bank[places].T
            if stray is not None:
                strays.append(tokens[stray])
        return strays


class _Additions:
    """The rows that a pass adds to tallies, or has them hold."""

    def __init__(self) -> None:
        self._parts: list[tuple[int | None, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def fill(
        self, step: Step, moves: Moves | None, chosen: npt.NDArray[np.bool_], layouts: Layouts, slots: int
    ) -> None:
        """Take in those of the chosen tokens of a pass that go into tallies."""
        self._parts = []
        if moves is None:
            return
        points = layouts.offsets.shape[1]
        places, kinds = np.repeat(moves.places, moves.counts), np.repeat(moves.kinds, moves.counts)
        newest = np.append(places[1:] != places[:-1], True)
        for kind in np.unique(kinds):
            wanted = (kinds == kind) & (newest | (kind != LAST))
            self._part(int(kind), step, moves.added[wanted], places[wanted] * points, chosen, layouts)
        request, slot = np.nonzero(moves.holds != NONE)
        lines = (moves.places[request] * slots + slot) * points
        self._part(None, step, moves.holds[request, slot], lines, chosen, layouts)

    def _part(  # noqa: PLR0917 -- the columns of a table
        self, kind: int | None, step: Step, rows: Ints, lines: Ints, chosen: npt.NDArray[np.bool_], layouts: Layouts
    ) -> None:
        """Rows added alike, or held (None): their tokens, and their line for each point, NONE where it has none."""
        rows, lines = rows[chosen[rows]], lines[chosen[rows]]
        if len(rows):
            offsets = layouts.offsets[step.layouts[rows]].astype(np.int64).T
            where = np.where(offsets == NONE, NONE, lines + offsets)
            tokens = torch.from_numpy(step.tokens[rows])
            self._parts.append((kind, tokens, torch.from_numpy(where), torch.from_numpy((offsets != NONE).all(1))))

    def add(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
        sums: Float[torch.Tensor, "lines width"],
        held: Float[torch.Tensor, "slots width"],
    ) -> Sequence[torch.Tensor]:
        """Add, or hold, the rows of one point; gives the tokens of those that are not finite."""
        strays = []
        for kind, all_tokens, places, complete in self._parts:
            tokens, where = all_tokens, places[point]
            if not complete[point]:
                wanted = where != NONE
                tokens, where = tokens[wanted], where[wanted]
            if not len(tokens):
                continue
            if kind is None:
                stray = copy_rows(hidden, residual, tokens, where, held)
            else:
                rows = torch.empty((len(tokens), hidden.shape[-1]), dtype=held.dtype)
                stray = copy_rows(hidden, residual, tokens, torch.arange(len(tokens)), rows)
                _add(sums, where, rows, kind)
            if stray is not None:
                strays.append(tokens[stray])
        return strays


def _add(sums: torch.Tensor, where: torch.Tensor, rows: torch.Tensor, kind: int) -> None:
    """Add rows to those at `where`; several for the same one lie one behind the other."""
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


class _Edits:
    """The edits of a pass, as columns over its tokens."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._layout: tuple[object, ...] = ()
        self._columns: dict[int, tuple[Column, ...]] = {}
        self._used: list[int] = []  # entries of the longest program of each point
        self._single_scope = False
        self._slots = np.zeros(0, dtype=np.int64)
        self._chosen = np.zeros(0, dtype=np.int64)
        self._tokens = torch.zeros(0, dtype=torch.int64)
        self._masks = torch.zeros(0, dtype=torch.int32)
        self._replacements = torch.zeros((0, 1), dtype=torch.int64)
        self._evidence = torch.zeros(0, dtype=torch.int64)
        self._overflowed = torch.zeros(0, dtype=torch.int64)

    def fill(self, step: Step) -> None:
        """Take in the tokens of a pass that are changed."""
        self._chosen = np.flatnonzero(step.changed)
        self._tokens = torch.from_numpy(step.tokens[self._chosen])
        if not len(self._chosen):
            return
        self._masks = torch.from_numpy(step.masks[self._chosen])
        self._evidence = torch.zeros(len(self._chosen), dtype=torch.int64)
        self._overflowed = torch.full_like(self._evidence, NONE)
        slots = step.slots[self._chosen]
        self._replacements = torch.from_numpy(
            _replacements(step, self._chosen, int(self._programs.replacements[slots].max()))
        )
        layout = (self._programs.written, slots.tobytes())
        if layout != self._layout:
            self._lay_out(slots)
            self._layout = layout

    def _lay_out(self, slots: Ints) -> None:
        """Which slot each token has: one for all of them where they agree; and which points have work at all."""
        distinct = np.unique(slots)
        self._slots = distinct if len(distinct) == 1 else slots
        self._used = self._programs.counts[distinct].max(0).tolist()
        self._single_scope = bool((self._programs.scopes[distinct] == 1).all())
        self._columns = {}

    def wanted(self, point: int, dtype: torch.dtype) -> bool:
        """Whether anybody edits at this point in this pass, or edited rows must be looked at there."""
        return len(self._tokens) > 0 and (self._used[point] > 0 or overflows_later(dtype))

    def apply(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
        bank: Float[torch.Tensor, "vectors width"],
    ) -> None:
        """Edit the stream at one point."""
        columns = self._columns.get(point)
        if columns is None:
            columns = self._columns[point] = self._at(point)
        applied, stray = edit_stream(hidden, residual, self._tokens, columns, self._masks, self._replacements, bank)
        self._evidence.add_(applied, alpha=weight(point))
        if stray is not None:
            self._overflowed[stray & (self._overflowed == NONE)] = point

    def made(self, step: Step) -> tuple[Ints, Ints]:
        """What the edits of each token of the step add up to, and the first point where they left no finite row."""
        made, overflowed = np.zeros(len(step), dtype=np.int64), np.full(len(step), NONE, dtype=np.int64)
        if len(self._chosen):
            made[self._chosen], overflowed[self._chosen] = self._evidence.numpy(), self._overflowed.numpy()
        return made, overflowed

    def _at(self, point: int) -> tuple[Column, ...]:
        where = self._slots, point
        return tuple(
            _column(
                {name: column[(*where, entry)] for name, column in self._programs.columns.items()},
                self._programs.responses[(*where, entry)],
                single_scope=self._single_scope,
            )
            for entry in range(self._used[point])
        )


def _column(
    numbers: Mapping[str, npt.NDArray[np.int32]], response: npt.NDArray[np.float32], *, single_scope: bool
) -> Column:
    """One entry of every token's slot."""
    kind = numbers["kind"]
    fields: dict[str, Any] = {
        name: torch.from_numpy(values) if (values != neutral).any() else None
        for name, values, neutral in zip(RESPONSE_NUMBERS, response.T, Response().numbers, strict=True)
    }
    for name in ("gain", "offset"):
        fields[name] = torch.from_numpy(response[:, RESPONSE_NUMBERS.index(name)])
    for name, bit in _BITS.items():
        fields[name] = None if (kind & bit).all() else torch.from_numpy((kind & bit) != 0)
    for name in ("write", "read", "replacement"):
        fields[name] = torch.from_numpy(numbers[name]).to(torch.int64)
    scope = None if single_scope else torch.from_numpy(numbers["scope"])
    return Column(kinds=int(np.bitwise_or.reduce(kind)), scope=scope, **fields)


def _replacements(step: Step, chosen: Ints, most: int) -> Ints:
    """Bank row that each replacement puts in the place of each chosen token, one column at least.

    Args:
        step: the pass.
        chosen: the tokens.
        most: replacements of the slot that has most of them: entries name their columns also for tokens that none of
            them replaces.
    """
    table: Ints = np.full((len(chosen), max(most, 1)), NONE, dtype=np.int64)
    for place, rows in step.replaced.items():
        table[np.searchsorted(chosen, place), : len(rows)] = rows
    return table


def _host(values: torch.Tensor, tokens: torch.Tensor) -> Ints:
    found: Ints = values[tokens].to(torch.int64).numpy()
    return found
