"""Host tables of the steering configuration in each slot, and the edits of a pass on CPU.

A slot's tables list the rank-one edits of each point, in order, or the directions that rows are projected on. They are
written when the client sends a configuration, and read in place. Shape legend: points = points of this rank;
entries = maximum rank-one edits of a point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float

from steercap.core.program import MAX_SCOPES, NONE, RESPONSE_NUMBERS, Configuration, Entry, Response
from steercap.core.rows import Ints
from steercap.kernels.bits import (
    JOINED,
    LEADS,
    MEASURES,
    READS,
    RELATIVE,
    REPLACES,
    RESTORES,
    USED,
    overflows_later,
    weight,
)
from steercap.kernels.reference import TokenEntries, edit_stream
from steercap.worker.step import Step

_SCOPE_BITS: Final = np.arange(MAX_SCOPES, dtype=np.int32)
#: Maximum number of checksums in the cache.
MAX_KNOWN: Final = 4096


class Programs:
    """Tables of the steering configurations in all slots.

    Args:
        points: indices of this rank's points among the engine's armed points.
        slots: number of slots.
        entries: maximum rank-one edits of a point.
    """

    def __init__(self, points: Sequence[int], *, slots: int, entries: int) -> None:
        self.points = tuple(points)
        shape = (slots, len(self.points), entries)
        #: Integers of every entry, int32 [slots, points, entries] each; 0 for unused entries.
        self.columns = {name: np.zeros(shape, dtype=np.int32) for name in ENTRY_NUMBERS}
        #: Response parameters of every entry, float32 [slots, points, entries, 8].
        self.responses = np.zeros((*shape, len(RESPONSE_NUMBERS)), dtype=np.float32)
        #: Number of entries of each slot at each point, int32 [slots, points].
        self.counts = np.zeros(shape[:2], dtype=np.int32)
        #: Number of token selections of each slot's configuration, int64 [slots].
        self.scopes = np.zeros(slots, dtype=np.int64)
        #: Number of replacements of each slot's configuration, int64 [slots].
        self.replacements = np.zeros(slots, dtype=np.int64)
        #: Bank rows of each point's directions, by slot: int64 [points, directions], NONE for points without
        #: directions.
        self.projections: dict[int, Ints] = {}
        #: Number of writes to any slot.
        self.written = 0
        self._per_scope = np.zeros((slots, MAX_SCOPES), dtype=np.int64)
        self._known: dict[tuple[int, int], int] = {}  # checksums, by slot and mask

    def configure(self, slot: int, configuration: Configuration, bank_rows: Sequence[Sequence[int]]) -> None:
        """Write a configuration into a slot; `bank_rows` are the vector-bank rows of each of its blobs."""
        self.written += 1
        self._known.clear()
        self.projections.pop(slot, None)
        if configuration.reads:
            self.projections[slot] = self._directions(configuration.reads, bank_rows[0])
        for column in self.columns.values():
            column[slot] = 0
        self.responses[slot] = Response().numbers
        self.counts[slot] = 0
        self.scopes[slot] = configuration.scopes
        self.replacements[slot] = configuration.replacements
        self._per_scope[slot] = 0
        for local, point in enumerate(self.points):
            entries = configuration.at(point)
            self.counts[slot, local] = len(entries)
            for at, entry in enumerate(entries):
                self._write((slot, local, at), entry, bank_rows)
                self.columns["kind"][slot, local, at] = _kind(entries, at)
                self._per_scope[slot, entry.scope] += weight(local)

    def _directions(self, reads: Sequence[int], bank_rows: Sequence[int]) -> Ints:
        """Return each local point's bank rows, NONE for points without directions: int64 [points, directions].

        Args:
            reads: indices, among the engine's armed points, of the points with directions.
            bank_rows: bank rows of the directions, point after point.
        """
        given: Ints = np.array(bank_rows, dtype=np.int64).reshape(len(reads), -1)
        found = np.full((len(self.points), given.shape[1]), NONE, dtype=np.int64)
        for point, rows in zip(reads, given, strict=True):
            if point in self.points:
                found[self.points.index(point)] = rows
        return found

    def _write(self, where: tuple[int, int, int], entry: Entry, bank_rows: Sequence[Sequence[int]]) -> None:
        self.columns["scope"][where] = entry.scope
        self.columns["write"][where] = bank_rows[entry.write][0]
        self.columns["read"][where] = 0 if entry.read == NONE else bank_rows[entry.read][0]
        self.columns["replacement"][where] = max(entry.replacement, 0)
        self.responses[where] = entry.response.numbers

    def checksums(self, slots: npt.NDArray[np.integer], masks: npt.NDArray[np.int32]) -> Ints:
        """Return the checksum that each token's edits have if all of them are made: int64 [tokens].

        Args:
            slots: slot of each token, NONE for none.
            masks: bit mask of the scopes (token selections) that select each token, int32 [tokens].
        """
        if not masks.any():
            return np.zeros(len(masks), dtype=np.int64)
        bits = (masks[:, None] >> _SCOPE_BITS) & 1
        expected: Ints = (bits * self._per_scope[np.maximum(slots, 0)]).sum(-1)
        expected[slots < 0] = 0
        return expected

    def checksum(self, slot: int, mask: int) -> int:
        """Return the checksum that the edits of one token have if all are made; cached by slot and scope mask."""
        found = self._known.get((slot, mask))
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = int(self.checksums(np.array([slot]), np.array([mask], dtype=np.int32))[0])
            self._known[slot, mask] = found
        return found


#: Names of the integer columns of an entry.
ENTRY_NUMBERS: Final = ("kind", "scope", "write", "read", "replacement")


def _kind(entries: Sequence[Entry], at: int) -> int:
    """Return the kind bits of entry number `at` among the entries of one point."""
    entry = entries[at]
    kind = USED
    kind |= READS if entry.read != NONE else 0
    kind |= RELATIVE if entry.response.relative else 0
    kind |= REPLACES if entry.replacement != NONE else 0
    kind |= JOINED if entry.joined else 0
    kind |= LEADS if not entry.joined and at + 1 < len(entries) and entries[at + 1].joined else 0
    if entry.norm != NONE:
        kind |= MEASURES if at == 0 or entries[at - 1].norm != entry.norm else 0
        kind |= RESTORES if at + 1 == len(entries) or entries[at + 1].norm != entry.norm else 0
    return kind


#: Kind bits of an entry that a `TokenEntries` holds as one boolean mask each, by the name of its field.
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
    """Edits of a pass on CPU, as columns with one value for each edited token."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._layout: tuple[object, ...] = ()
        self._columns: dict[int, tuple[TokenEntries, ...]] = {}
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
        """Load the edited tokens of a pass from its step: slots, scopes and replacements."""
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
        """Store the slot of each edited token, or one slot if all share it; and the number of entries at each point."""
        distinct = np.unique(slots)
        self._slots = distinct if len(distinct) == 1 else slots
        self._used = self._programs.counts[distinct].max(0).tolist()
        self._single_scope = bool((self._programs.scopes[distinct] == 1).all())
        self._columns = {}

    def wanted(self, point: int, dtype: torch.dtype) -> bool:
        """Return whether this pass edits rows at a point (index on this rank), or must check edited rows there."""
        return len(self._tokens) > 0 and (self._used[point] > 0 or overflows_later(dtype))

    def apply(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: int,
        bank: Float[torch.Tensor, "vectors width"],
    ) -> None:
        """Edit the rows `hidden + residual` of the pass's edited tokens at one point (index on this rank), in place.

        An edited row goes whole into `hidden`, and its residual becomes 0. A row that is not finite, or too large for
        the dtype, becomes 0, and the token's first such point is recorded as overflowed. The number of edits made is
        added to the token's checksum, weighted by point.
        """
        columns = self._columns.get(point)
        if columns is None:
            columns = self._columns[point] = self._at(point)
        applied, stray = edit_stream(hidden, residual, self._tokens, columns, self._masks, self._replacements, bank)
        self._checksums.add_(applied, alpha=weight(point))
        if stray is not None:
            self._overflowed[stray & (self._overflowed == NONE)] = point

    def made(self, step: Step) -> tuple[Ints, Ints]:
        """Return each token's checksum of edits, and first point that overflowed or NONE: int64 [tracked] each."""
        made, overflowed = np.zeros(len(step), dtype=np.int64), np.full(len(step), NONE, dtype=np.int64)
        if len(self._chosen):
            made[self._chosen], overflowed[self._chosen] = self._checksums.numpy(), self._overflowed.numpy()
        return made, overflowed

    def _at(self, point: int) -> tuple[TokenEntries, ...]:
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
) -> TokenEntries:
    """Return the column of one entry, given its integers and response parameters in every token's slot."""
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
    return TokenEntries(kinds=int(np.bitwise_or.reduce(kind)), scope=scope, **fields)


def _replacements(step: Step, chosen: Ints, most: int) -> Ints:
    """Return the bank row of each replacement for each chosen token, NONE for none: int64 [chosen, max(most, 1)].

    Args:
        step: step of the pass.
        chosen: indices of the edited tokens in the step.
        most: greatest number of replacements of a slot; entries index these columns for tokens without replacement too.
    """
    table: Ints = np.full((len(chosen), max(most, 1)), NONE, dtype=np.int64)
    for index, rows in step.replaced.items():
        table[np.searchsorted(chosen, index), : len(rows)] = rows
    return table
