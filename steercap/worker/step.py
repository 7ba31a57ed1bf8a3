"""One forward pass: the layout that a runner adapter describes, the work for its tokens, and the proof of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.program import NONE
from steercap.core.rows import Ints


@dataclass(frozen=True)
class BatchRows:
    """Layout of one forward pass: request by request, tokens of a request consecutive.

    Args:
        request_ids: the runner's ids, in batch order.
        starts: position of each request's first token in this pass: int64 [requests].
        counts: tokens of each request in this pass: int64 [requests].
        token_ids: the ids the model reads, [tokens] at least, on the model's device.
        positions: the positions the model reads, [tokens] at least, on the model's device.
    """

    request_ids: Sequence[str]
    starts: Ints
    counts: Ints
    token_ids: torch.Tensor
    positions: torch.Tensor


@dataclass
class Step:
    """Work for the tracked tokens of one pass, in the order of the batch.

    Args:
        requests: index of each token's request in the request table, int64 [tracked].
        tokens: index of each token in the batch, int64 [tracked].
        positions: position of each token, as scheduled, int64 [tracked].
        firsts: position of the first token of the same request in this pass, int64 [tracked].
        lines: first line of each token's record in the arena, NONE if it has none there: int64 [tracked].
        strides: lines of that record, 0 if it has none there: int64 [tracked].
        accumulators: accumulator of the request, NONE if it has none or the token is not kept: int64 [tracked].
        layouts: layout of each token's record, NONE if it is not kept: int64 [tracked].
        slots: slot of each token's configuration, NONE if no scope selects it: int64 [tracked].
        masks: bits of the scopes that select each token, int32 [tracked].
        copies: expected checksum of each token's copies, int64 [tracked].
        edits: expected checksum of each token's edits, int64 [tracked].
        replaced: bank row of each replacement, NONE for none, int64 [replacements], by the index of the token in these
            tables; only for tokens with a replacement.
        series: identity of the series; the steps of one series differ in positions, firsts and lines alone.
    """

    requests: Ints
    tokens: Ints
    positions: Ints
    firsts: Ints
    lines: Ints
    strides: Ints
    accumulators: Ints
    layouts: Ints
    slots: Ints
    masks: npt.NDArray[np.int32]
    copies: Ints
    edits: Ints
    replaced: dict[int, Ints]
    series: object = field(default_factory=object, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens that are kept, in the arena or in a reduction: bool [tracked]."""
        kept: npt.NDArray[np.bool_] = self.layouts != NONE
        return kept

    @property
    def drained(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens whose rows go to the arena and not into a reduction: bool [tracked]."""
        drained: npt.NDArray[np.bool_] = self.lines != NONE
        return drained

    @property
    def changed(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens that a scope of their configuration selects: bool [tracked]."""
        changed: npt.NDArray[np.bool_] = self.slots != NONE
        return changed

    def following(self) -> Step:
        """Return the next step of the series: positions plus 1, lines plus those of a record."""
        positions = self.positions + 1
        return replace(self, positions=positions, firsts=positions, lines=self.lines + self.strides)

    def keeping_nothing(self) -> Step:
        """Return a step with the same edits that keeps no rows."""
        nothing = np.full(len(self), NONE, dtype=np.int64)
        none = np.zeros(len(self), dtype=np.int64)
        return replace(self, lines=nothing, strides=none, layouts=nothing, copies=none, series=object())

    @staticmethod
    def joined(parts: Sequence[Step]) -> Step:
        """Join parts of one pass into one step, its tokens in the order of the batch."""
        if len(parts) == 1:
            return parts[0]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        order = np.argsort(arrays["tokens"])
        index_of = np.argsort(order)
        before = np.cumsum([0, *(len(part) for part in parts)])
        replaced = {
            int(index_of[first + index]): rows
            for first, part in zip(before, parts, strict=False)
            for index, rows in part.replaced.items()
        }
        return Step(**{name: values[order] for name, values in arrays.items()}, replaced=replaced)


_ARRAYS: Final = tuple(one.name for one in fields(Step) if one.name not in {"replaced", "series"})


@dataclass(frozen=True)
class StepReport:
    """Report on the tracked tokens of consecutive passes, pass by pass, in the order of their steps.

    Args:
        token_ids: token ids that the model read, int64 [tracked].
        positions: positions that the model read, int64 [tracked].
        edits: checksum of the edits made, int64 [tracked].
        copies: checksum of the copies made, int64 [tracked].
        overflowed: this rank's first point where an edit left a row that is not finite, NONE for none: int64 [tracked].
        nonfinite: this rank's first point with a kept row that is not finite, NONE for none: int64 [tracked].
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
        """Return the report on some of the tokens, such as those of one pass."""
        return replace(self, **{one.name: getattr(self, one.name)[tokens] for one in fields(self)[:-1]})


@dataclass
class SteadyDecode:
    """State that the passes of a series share, and its progress.

    Args:
        tracked: places in the batch of the tracked requests, int64 [requests tracked].
        starts: positions of the next pass, int64 [requests tracked].
        left: number of passes that still belong to the series.
        step: step of the last pass.
    """

    tracked: Ints
    starts: Ints
    left: int
    step: Step

    def next(self, batch: BatchRows) -> Step | None:
        """Return the step of the next pass over the same requests in the same order; None if the series ends."""
        if self.left < 1 or batch.counts.max() != 1:
            return None
        if (batch.starts[self.tracked] != self.starts).any():
            return None
        self.left -= 1
        self.starts = self.starts + 1
        self.step = self.step.following()
        return self.step
