"""Host tables of the slots: each point's rank-one edits in order, or its directions.

A slot is written when the client sends a configuration, and read in place. Shape legend: points = points of this rank;
entries = maximum rank-one edits of a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from steercap.core.program import MAX_SCOPES, NONE, RESPONSE_NUMBERS, Configuration, Entry, Response
from steercap.core.rows import Ints
from steercap.kernels.bits import JOINED, LEADS, MEASURES, READS, RELATIVE, REPLACES, RESTORES, USED, weight

_SCOPE_BITS: Final = np.arange(MAX_SCOPES, dtype=np.int32)
#: Maximum checksums to remember.
MAX_KNOWN: Final = 4096


class Programs:
    """Tables of the configurations in all slots.

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
        #: Bank rows of the directions of each point, NONE where it has none: int64 [points, directions], by slot.
        self.projections: dict[int, Ints] = {}
        #: Number of writes to any slot.
        self.written = 0
        self._per_scope = np.zeros((slots, MAX_SCOPES), dtype=np.int64)
        self._known: dict[tuple[int, int], int] = {}  # checksums, by slot and mask

    def configure(self, slot: int, configuration: Configuration, bank_rows: Sequence[Sequence[int]]) -> None:
        """Write a configuration into a slot.

        Args:
            slot: number of the slot.
            configuration: the edits.
            bank_rows: bank rows of each of its blobs.
        """
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
        """Return the bank rows of the directions of each point: int64 [points, directions]."""
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
        """Return the checksum of each token's edits, if all of them are made: int64 [tokens].

        Args:
            slots: slot of each token, NONE for none.
            masks: bits of the scopes that select each token.
        """
        if not masks.any():
            return np.zeros(len(masks), dtype=np.int64)
        bits = (masks[:, None] >> _SCOPE_BITS) & 1
        expected: Ints = (bits * self._per_scope[np.maximum(slots, 0)]).sum(-1)
        expected[slots < 0] = 0
        return expected

    def checksum(self, slot: int, mask: int) -> int:
        """Return the checksum of the edits of one token; requests that enter together mostly share it."""
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
    """Return the kind bits of one entry among those of its point."""
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
