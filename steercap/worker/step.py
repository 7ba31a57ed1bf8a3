"""One forward pass: its batch as a runner adapter describes it, the work for its tokens, and the device's report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.program import NONE
from steercap.core.rows import Ints
from steercap.kernels.bits import BEFORE, LAYOUT, MASK, SLOT, TOKEN_COLUMNS
from steercap.worker.arena import Layouts

#: Columns of a step's table. From DEVICE on they are those of the device's table, which `kernels.bits` names; of these,
#: line, replacement and report are NONE here. A pass's report is compared with the first COMPARED columns.
REQUEST, POSITION, COPIES, EDITS, DEVICE = range(5)
COMPARED: Final = DEVICE + LAYOUT + 1
TOKEN, FIRST, LINE, STRIDE, ACCUMULATOR, RAW_LINES, ENCODED, COLUMNS = range(
    DEVICE + TOKEN_COLUMNS, DEVICE + TOKEN_COLUMNS + 8
)


class BatchRows(NamedTuple):
    """Batch of one forward pass: request by request, the tokens of a request consecutive.

    Args:
        request_ids: the runner's ids, in batch order.
        starts: position of each request's first token in this pass: integers [requests].
        counts: tokens of each request in this pass, one at least: integers [requests].
        num_tokens: sum of `counts`.
        token_ids: token ids that the model reads, [num_tokens] or longer, on the model's device.
        positions: positions that the model reads, [num_tokens] or longer, on the model's device.
        ahead: number of positions by which each start may be ahead of the device's, since asynchronous scheduling
            counts on all drafts in flight: integers [requests]; None without drafts in flight.
        exact: True if the starts are the device's all the same.
        failure: reason why rows of the pass may be of another request than it says; None if there is none.
    """

    request_ids: Sequence[str]
    starts: npt.NDArray[np.integer]
    counts: npt.NDArray[np.integer]
    num_tokens: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    ahead: npt.NDArray[np.integer] | None = None
    exact: bool = False
    failure: str | None = None

    def settled(self) -> BatchRows:
        """Return the batch with the starts that the device has, after waiting for the passes before it.

        A start that rejected drafts do not explain stays as scheduled, so that the pass's report fails its request.
        """
        if self.ahead is None or self.exact:
            return self
        scheduled, counts = self.starts.astype(np.int64), self.counts.astype(np.int64)
        read = self.positions[: self.num_tokens].cpu().numpy()[counts.cumsum() - counts]
        explained = (read <= scheduled) & (scheduled <= read + self.ahead)
        return self._replace(starts=np.where(explained, read, scheduled), exact=True)


class StepColumn:
    """Descriptor that returns a column of `Step.table`, by its number: int64 [tracked]."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __get__(self, step: Step, _owner: type[Step]) -> Ints:
        column: Ints = step.table[self._number]
        return column


class MovingColumn(StepColumn):
    """Column that grows in each pass of a series, by 1 or by the values of the column numbered `growth`."""

    def __init__(self, number: int, growth: int | None = None) -> None:
        super().__init__(number)
        self._growth = growth

    def __get__(self, step: Step, _owner: type[Step]) -> Ints:
        column = super().__get__(step, _owner)
        if not step.ahead:
            return column
        return column + (step.ahead if self._growth is None else step.ahead * step.table[self._growth])


@dataclass
class Step:
    """Work of the taps for the tracked tokens of one pass, in the order of the batch.

    Args:
        table: the step's columns, int64 [COLUMNS, tracked]; in a series, those of the series' first step.
        replaced: bank row of each replacement, NONE for none, int64 [replacements], by the token's index among the
            tracked; only for tokens with a replacement.
        series: identity of the series of passes that share `table`; they differ in positions, firsts and lines alone.
        ahead: number of passes since the first step of the series.
        bounds: for each token, the lowest position at which its request may begin the pass, and the position from which
            on its rows are dropped, int64 [2, tracked], until `settle` corrects the positions; None if they are exact.
    """

    table: Ints
    replaced: dict[int, Ints] = field(default_factory=dict)
    series: object = field(default_factory=object, repr=False, compare=False)
    ahead: int = 0
    bounds: Ints | None = None

    #: Index of each token in the batch.
    tokens = StepColumn(TOKEN)
    #: Position of the first token of the same request in this pass, for each token.
    firsts = MovingColumn(FIRST)
    #: First line of each token's record in the arena, NONE if it has none there.
    lines = MovingColumn(LINE, STRIDE)
    #: Lines of that record, 0 if the token has none in the arena.
    strides = StepColumn(STRIDE)
    #: Accumulator of the request, NONE if it has none or the token is not kept.
    accumulators = StepColumn(ACCUMULATOR)
    #: Lines of each token's raw record, 0 if it is not kept.
    raw_lines = StepColumn(RAW_LINES)
    #: 1 where the record in the arena is stored in another form than it is computed in, else 0.
    encoded = StepColumn(ENCODED)
    #: Index of each token's request in the request table.
    requests = StepColumn(REQUEST)
    #: Position of each token, as scheduled.
    positions = MovingColumn(POSITION)
    #: Expected checksum of each token's copies.
    copies = StepColumn(COPIES)
    #: Expected checksum of each token's edits.
    edits = StepColumn(EDITS)
    #: Slot of each token's configuration, NONE if no scope selects it.
    slots = StepColumn(DEVICE + SLOT)
    #: Bit mask of the scopes (token selections) that select each token.
    masks = StepColumn(DEVICE + MASK)
    #: Layout of each token's record, NONE if it is not kept.
    layouts = StepColumn(DEVICE + LAYOUT)

    @staticmethod
    def of(known: Layouts, /, *, replaced: dict[int, Ints] | None = None, **columns: npt.NDArray[np.integer]) -> Step:
        """Create a step from some of its columns, by their names above; the others follow from the layouts.

        Args:
            known: record layouts of the rank.
            replaced: see the class; None for no replacements.
            **columns: tokens, firsts, lines, accumulators, requests, positions, edits, slots, masks and layouts.
        """
        step = Step(np.full((COLUMNS, len(columns["tokens"])), NONE, dtype=np.int64), replaced or {})
        for name, values in columns.items():
            getattr(step, name)[:] = values
        of, drained = step.layouts, step.drained
        step.strides[:], step.encoded[:] = known.lines[of] * drained, known.encoded[of] & drained
        step.raw_lines[:], step.copies[:] = known.raw_lines[of], known.checksums[of]
        step.table[DEVICE + BEFORE] = known.before[of]
        return step

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @property
    def device_columns(self) -> Ints:
        """Columns of the device's table, in the order of `kernels.bits`: int64 [TOKEN_COLUMNS, tracked]."""
        return self.table[DEVICE : DEVICE + TOKEN_COLUMNS]

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens that are captured, in the arena or in a reduction: bool [tracked]."""
        kept: npt.NDArray[np.bool_] = self.layouts != NONE
        return kept

    @property
    def drained(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens whose rows go to the arena and not into a reduction: bool [tracked]."""
        drained: npt.NDArray[np.bool_] = self.lines != NONE
        return drained

    @property
    def changed(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens that are edited, since a scope of their configuration selects them: bool [tracked]."""
        changed: npt.NDArray[np.bool_] = self.slots != NONE
        return changed

    def following(self) -> Step:
        """Return the next step of the series: positions grow by 1, arena lines by those of a record."""
        return Step(self.table, self.replaced, self.series, self.ahead + 1)

    @property
    def lowest(self) -> Ints:
        """Lowest position that each token may have: int64 [tracked]."""
        return self.positions if self.bounds is None else self.positions - self.firsts + self.bounds[0]

    def settle(self, read: Ints) -> None:
        """Correct the positions of a pass that was scheduled ahead of the device, and its rows' lines; idempotent.

        A position that rejected drafts do not explain stays as scheduled, so that the pass's report fails its request.

        Args:
            read: positions that the model read, int64 [tracked].
        """
        if self.bounds is None:
            return
        (lowest, stops), self.bounds = self.bounds, None
        begins = np.flatnonzero(np.diff(self.requests, prepend=NONE))
        firsts, found = self.firsts[begins], self.firsts[begins] + (read - self.positions)[begins]
        shift = np.where((lowest[begins] <= found) & (found <= firsts), found - firsts, 0)
        shift = shift.repeat(np.diff(begins, append=len(self)))
        self.table[[POSITION, FIRST]] += shift
        self.table[LINE] += shift * self.strides
        past = self.positions >= stops
        self.table[LINE, past], self.table[STRIDE, past] = NONE, 0

    def keeping_nothing(self) -> Step:
        """Return a step with the same edits that captures no rows."""
        step = Step(self.table.copy(), self.replaced, ahead=self.ahead, bounds=self.bounds)
        step.table[[LINE, DEVICE + LAYOUT]] = NONE
        step.table[[STRIDE, RAW_LINES, ENCODED, COPIES, DEVICE + BEFORE]] = 0
        return step

    @staticmethod
    def compared(steps: Sequence[Step]) -> Step:
        """Return a step whose table has the first COMPARED columns of consecutive passes, one pass after the other."""
        parts = []
        for step, ahead in _by_table(steps):
            part = np.tile(step.table[:COMPARED], len(ahead))
            part[POSITION] = (step.table[POSITION] + ahead).ravel()
            parts.append(part)
        return Step(np.concatenate(parts, axis=1))

    @staticmethod
    def records(steps: Sequence[Step]) -> Ints:
        """Return the first arena line of each token's record, and its number of lines, one pass after the other.

        Returns:
            int64 [2, tracked of all passes]; NONE and 0 for tokens without a record.
        """
        parts = []
        for step, ahead in _by_table(steps):
            strides = step.strides
            lines = step.table[LINE] + ahead * strides
            parts.append(np.stack([lines.ravel(), np.tile(strides, len(ahead))]))
        return np.concatenate(parts, axis=1)

    @staticmethod
    def joined(parts: Sequence[Step]) -> Step:
        """Join steps of different requests in one pass into one step, its tokens in the order of the batch."""
        if len(parts) == 1:
            return parts[0]
        table = np.concatenate([part.table for part in parts], axis=1)
        order = np.argsort(table[TOKEN])
        index_of = np.argsort(order)
        before = np.cumsum([0, *(len(part) for part in parts)])
        replaced = {
            int(index_of[first + index]): rows
            for first, part in zip(before, parts, strict=False)
            for index, rows in part.replaced.items()
        }
        return Step(table[:, order], replaced)


def _by_table(steps: Sequence[Step]) -> Iterator[tuple[Step, Ints]]:
    """Yield runs of consecutive steps of one series: the first step, and the `ahead` of all, int64 [steps, 1]."""
    for _, run in groupby(steps, key=lambda step: id(step.table)):
        alike = list(run)
        yield alike[0], np.array([[step.ahead] for step in alike])


@dataclass(frozen=True)
class StepReport:
    """Device's report on the tracked tokens of consecutive passes, pass by pass, in the order of their steps.

    Args:
        token_ids: token ids that the model read, int64 [tracked].
        positions: positions that the model read, int64 [tracked].
        edits: checksum of the edits made, int64 [tracked].
        copies: checksum of the copies made, int64 [tracked].
        overflowed: this rank's index of the first point whose edited row is not finite or too large, NONE for none:
            int64 [tracked].
        nonfinite: this rank's index of the first point with a non-finite captured row, NONE for none: int64 [tracked].
        failure: reason why none of the passes can be trusted, or None.
    """

    token_ids: Ints
    positions: Ints
    edits: Ints
    copies: Ints
    overflowed: Ints
    nonfinite: Ints
    failure: str | None = None

    def of(self, tokens: slice) -> StepReport:
        """Return the report on a slice of the tokens, such as those of one pass."""
        return replace(self, **{one.name: getattr(self, one.name)[tokens] for one in fields(self)[:-1]})
