"""One pass: the tokens that are kept or changed, what must be done with them, and what was done.

Shape legend: tracked = tokens of the pass that are kept or changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from steercap.core.program import NONE
from steercap.core.rows import Ints


@dataclass
class Step:
    """The tracked tokens of one pass, in the order of the batch.

    Args:
        requests: index of each token's request in the ledger, int64 [tracked].
        tokens: its index in the batch, int64 [tracked].
        positions: its position, as scheduled, int64 [tracked].
        firsts: position of the first token of its request in this pass, int64 [tracked].
        lines: first line of its record in the arena, NONE if it goes to none: int64 [tracked].
        accumulators: the accumulator of its request, NONE if it has none or the token is not kept: int64 [tracked].
        layouts: layout of its record, NONE if it is not kept: int64 [tracked].
        slots: slot of its configuration, NONE if it is not changed: int64 [tracked].
        masks: scopes that hold it, int32 [tracked].
        copies: what its copies must add up to, int64 [tracked].
        edits: what its edits must add up to, int64 [tracked].
        replaced: for some of the tokens, by their index in these tables, the bank row that each replacement of their
            configuration puts there, NONE for none: int64 [replacements].
        series: steps of the same one, an object of no other meaning, differ in positions, firsts and lines alone.
    """

    requests: Ints
    tokens: Ints
    positions: Ints
    firsts: Ints
    lines: Ints
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
        """Which tokens are kept, in the arena or in a reduction: bool [tracked]."""
        kept: npt.NDArray[np.bool_] = self.layouts != NONE
        return kept

    @property
    def drained(self) -> npt.NDArray[np.bool_]:
        """Which tokens' rows go to the arena, and not into a reduction: bool [tracked]."""
        drained: npt.NDArray[np.bool_] = self.lines != NONE
        return drained

    @property
    def changed(self) -> npt.NDArray[np.bool_]:
        """Which tokens some scope of their configuration holds: bool [tracked]."""
        changed: npt.NDArray[np.bool_] = (self.slots != NONE) & (self.masks != 0)
        return changed

    def following(self, record_lines: Ints) -> Step:
        """The next step of the series: one token further on, records so many lines further: int64 [tracked]."""
        positions = self.positions + 1
        return replace(self, positions=positions, firsts=positions, lines=self.lines + record_lines)

    def keeping_nothing(self) -> Step:
        """The same edits, and no rows."""
        nothing = np.full(len(self), NONE, dtype=np.int64)
        none = np.zeros(len(self), dtype=np.int64)
        return replace(self, lines=nothing, layouts=nothing, copies=none, series=object())

    @staticmethod
    def joined(parts: Sequence[Step]) -> Step:
        """Parts of one pass as one, its tokens in the order of the batch."""
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
class Witness:
    """What became of the tracked tokens of a pass, in the order of its step.

    Args:
        token_ids: the ids the model read, int64 [tracked].
        positions: the positions it read, int64 [tracked].
        edits: what the edits made add up to, int64 [tracked].
        copies: what the copies made add up to, int64 [tracked].
        overflowed: this rank's first point where an edit left no finite row, NONE if none did: int64 [tracked].
        nonfinite: this rank's first point whose row was kept and was not finite, NONE if all were: int64 [tracked].
        failure: why the whole pass cannot be trusted, or None.
    """

    token_ids: Ints
    positions: Ints
    edits: Ints
    copies: Ints
    overflowed: Ints
    nonfinite: Ints
    failure: str | None = None
