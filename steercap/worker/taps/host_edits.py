"""Edits of a pass on CPU: the programs of the slots at a point, as columns over the tokens of the pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float

from steercap.core.program import NONE, RESPONSE_NUMBERS, Response
from steercap.core.rows import Ints
from steercap.kernels.bits import JOINED, MEASURES, READS, RELATIVE, REPLACES, RESTORES, USED, overflows_later, weight
from steercap.kernels.reference import Column, edit_stream
from steercap.worker.programs import Programs
from steercap.worker.step import Step

#: Bits of an entry's kind that a column holds as one mask each.
_BITS: Final = {
    "used": USED,
    "reads": READS,
    "relative": RELATIVE,
    "replaces": REPLACES,
    "joined": JOINED,
    "measures": MEASURES,
    "restores": RESTORES,
}


class HostEdits:
    """Edits of a pass, as columns over its tokens."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._layout: tuple[object, ...] = ()
        self._columns: dict[int, tuple[Column, ...]] = {}
        self._used: list[int] = []  # length of the longest program at each point
        self._single_scope = False
        self._slots = np.zeros(0, dtype=np.int64)
        self._chosen = np.zeros(0, dtype=np.int64)
        self._tokens = torch.zeros(0, dtype=torch.int64)
        self._masks = torch.zeros(0, dtype=torch.int32)
        self._replacements = torch.zeros((0, 1), dtype=torch.int64)
        self._checksums = torch.zeros(0, dtype=torch.int64)
        self._overflowed = torch.zeros(0, dtype=torch.int64)

    def fill(self, step: Step) -> None:
        """Set the edited tokens of a pass."""
        self._chosen = np.flatnonzero(step.changed)
        self._tokens = torch.from_numpy(step.tokens[self._chosen])
        if not len(self._chosen):
            return
        self._masks = torch.from_numpy(step.masks[self._chosen].astype(np.int32))
        self._checksums = torch.zeros(len(self._chosen), dtype=torch.int64)
        self._overflowed = torch.full_like(self._checksums, NONE)
        slots = step.slots[self._chosen]
        self._replacements = torch.from_numpy(
            _replacements(step, self._chosen, int(self._programs.replacements[slots].max()))
        )
        layout = (self._programs.written, slots.tobytes())
        if layout != self._layout:
            self._lay_out(slots)
            self._layout = layout

    def _lay_out(self, slots: Ints) -> None:
        """Set the slot of each token, or one slot where all tokens share it; and find the points with edits."""
        distinct = np.unique(slots)
        self._slots = distinct if len(distinct) == 1 else slots
        self._used = self._programs.counts[distinct].max(0).tolist()
        self._single_scope = bool((self._programs.scopes[distinct] == 1).all())
        self._columns = {}

    def wanted(self, point: int, dtype: torch.dtype) -> bool:
        """Return whether this pass edits rows at this point, or must check edited rows there."""
        return len(self._tokens) > 0 and (self._used[point] > 0 or overflows_later(dtype))

    def apply(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
        bank: Float[torch.Tensor, "vectors width"],
    ) -> None:
        """Edit the rows `hidden + residual` of the pass's edited tokens at one armed point, in place.

        A changed row goes whole into `hidden`, and its residual becomes 0. A row that is not finite or too large
        becomes 0, and the first such point is recorded as overflowed. The number of edits goes into the token's
        checksum.
        """
        columns = self._columns.get(point)
        if columns is None:
            columns = self._columns[point] = self._at(point)
        applied, stray = edit_stream(hidden, residual, self._tokens, columns, self._masks, self._replacements, bank)
        self._checksums.add_(applied, alpha=weight(point))
        if stray is not None:
            self._overflowed[stray & (self._overflowed == NONE)] = point

    def made(self, step: Step) -> tuple[Ints, Ints]:
        """Return the checksum of each token's edits, and the first point where they left a row that is not finite."""
        made, overflowed = np.zeros(len(step), dtype=np.int64), np.full(len(step), NONE, dtype=np.int64)
        if len(self._chosen):
            made[self._chosen], overflowed[self._chosen] = self._checksums.numpy(), self._overflowed.numpy()
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
    """Return the column of one entry, given its numbers in every token's slot."""
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
    """Return the bank row of each replacement for each chosen token, at least one column: int64.

    Args:
        step: step of the pass.
        chosen: indices of the tokens.
        most: greatest number of replacements of a slot: entries name their columns also for tokens that none of
            them replaces.
    """
    table: Ints = np.full((len(chosen), max(most, 1)), NONE, dtype=np.int64)
    for index, rows in step.replaced.items():
        table[np.searchsorted(chosen, index), : len(rows)] = rows
    return table
