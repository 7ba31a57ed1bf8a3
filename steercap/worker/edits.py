"""The tables that tell every tap what to change: configurations in their slots, and the tokens of the step.

Number 5 in the life of a request. Configurations and vectors are written when the client sends them and stay where they
are; a step brings, for each token somebody steers, its slot, its scopes and its replacements. On CPU they are host
tensors. Shape legend: points = points of this rank; entries = most rank-one edits of a point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float

from steercap.core.program import MAX_SCOPES, NONE, RESPONSE_NUMBERS, Configuration, Entry, Response
from steercap.core.rows import Ints
from steercap.kernels.reference import (
    JOINED,
    LEADS,
    MEASURES,
    READS,
    RELATIVE,
    REPLACES,
    RESTORES,
    USED,
    Column,
    edit_stream,
)

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
_SCOPE_BITS: Final = np.arange(MAX_SCOPES, dtype=np.int32)


@dataclass(frozen=True)
class StepEdits:
    """What one request has changed in one pass.

    Args:
        slot: slot of its configuration.
        tokens: places in the batch of the tokens that some scope holds, int64 [steered].
        masks: scopes that hold each of them, int32 [steered].
        replacements: bank row that each replacement puts there, NONE for none: int64 [steered, replacements].
    """

    slot: int
    tokens: Ints
    masks: npt.NDArray[np.int32]
    replacements: Ints


class EditTables:
    """Slots, the vector bank, and the edits of the step that runs.

    Args:
        points: indices of this rank's points among the engine's armed points.
        width: elements of a row.
        slots: configurations held at once.
        rows: rows of the bank.
        entries: most rank-one edits of a point.
    """

    def __init__(self, points: Sequence[int], width: int, *, slots: int, rows: int, entries: int) -> None:
        self.points = tuple(points)
        # Zeroed pages are not resident until they are written.
        self.bank = torch.zeros((max(rows, 1), width), dtype=torch.float32)
        shape = (slots, len(self.points), entries)
        self._columns = {
            name: np.zeros(shape, dtype=np.int32) for name in ("kind", "scope", "write", "read", "replacement")
        }
        self._response = np.zeros((*shape, len(RESPONSE_NUMBERS)), dtype=np.float32)
        self._scopes = np.zeros(slots, dtype=np.int64)
        self._per_scope = np.zeros((slots, MAX_SCOPES), dtype=np.int64)
        self._written = 0  # how often a slot was written
        self._layout: tuple[object, ...] = ()
        self._programs: dict[int, tuple[Column, ...]] = {}
        self._used = [0] * len(self.points)  # entries of the longest program of each point
        self._single_scope = False
        self._slots = np.zeros(0, dtype=np.int64)
        self._expected = np.zeros(0, dtype=np.int64)
        self._tokens = torch.zeros(0, dtype=torch.int64)
        self._masks = torch.zeros(0, dtype=torch.int32)
        self._replacements = torch.zeros((0, 1), dtype=torch.int64)
        self._evidence = torch.zeros(0, dtype=torch.int64)

    def put(self, places: Sequence[int], vectors: Float[torch.Tensor, "rows width"]) -> None:
        """Write vectors into the bank."""
        self.bank[torch.tensor(places)] = vectors

    def configure(self, slot: int, configuration: Configuration, places: Sequence[Sequence[int]]) -> None:
        """Write a configuration into a slot.

        Args:
            slot: where.
            configuration: the edits.
            places: bank rows of each of its blobs.
        """
        self._written += 1
        for column in self._columns.values():
            column[slot] = 0
        self._response[slot] = Response().numbers
        self._scopes[slot] = configuration.scopes
        self._per_scope[slot] = 0
        for local, point in enumerate(self.points):
            entries = configuration.at(point)
            for at, entry in enumerate(entries):
                self._write(slot, local, at, entry, places)
                self._columns["kind"][slot, local, at] = _kind(entries, at)
                self._per_scope[slot, entry.scope] += _weight(local)

    def _write(self, slot: int, local: int, at: int, entry: Entry, places: Sequence[Sequence[int]]) -> None:
        where = slot, local, at
        self._columns["scope"][where] = entry.scope
        self._columns["write"][where] = places[entry.write][0]
        self._columns["read"][where] = 0 if entry.read == NONE else places[entry.read][0]
        self._columns["replacement"][where] = max(entry.replacement, 0)
        self._response[where] = entry.response.numbers

    def open(self, steps: Sequence[StepEdits]) -> None:
        """Take in the edits of the pass that is about to run."""
        self._tokens = torch.from_numpy(np.concatenate([step.tokens for step in steps]))
        masks = np.concatenate([step.masks for step in steps])
        self._masks = torch.from_numpy(masks)
        self._evidence = torch.zeros(len(masks), dtype=torch.int64)
        self._replacements = torch.from_numpy(_stacked([step.replacements for step in steps]))
        layout = (self._written, tuple((step.slot, len(step.tokens)) for step in steps))
        if layout != self._layout:
            self._lay_out([step.slot for step in steps], [len(step.tokens) for step in steps])
            self._layout = layout
        bits = (masks[:, None] >> _SCOPE_BITS) & 1
        self._expected = (bits * self._per_scope[self._slots]).sum(-1)

    def _lay_out(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Which slot each token has: one for all of them where they agree; and which points have work at all."""
        distinct = sorted(set(slots))
        self._slots = np.array(distinct) if len(distinct) == 1 else np.repeat(slots, counts)
        self._used = (self._columns["kind"][distinct] != 0).any(0).sum(-1).tolist()
        self._single_scope = bool((self._scopes[distinct] == 1).all())
        self._programs = {}

    def edits(self, point: int) -> bool:
        """Whether anybody edits at this point in this pass."""
        return self._used[point] > 0 and len(self._tokens) > 0

    def apply(
        self, hidden: Float[torch.Tensor, "n width"], residual: Float[torch.Tensor, "n width"] | None, point: int
    ) -> None:
        """Edit the stream at one point."""
        program = self._programs.get(point)
        if program is None:
            program = self._programs[point] = self._program(point)
        applied = edit_stream(hidden, residual, self._tokens, program, self._masks, self._replacements, self.bank)
        self._evidence.add_(applied, alpha=_weight(point))

    def close(self) -> Ints:
        """The pass has run: whether each token got all its edits; bool [steered], in the order of `open`, once."""
        got: Ints = self._evidence.numpy() == self._expected
        self._tokens, self._evidence, self._expected = self._tokens[:0], self._evidence[:0], self._expected[:0]
        return got

    def _program(self, point: int) -> tuple[Column, ...]:
        where = self._slots, point
        return tuple(
            _column(
                {name: column[(*where, entry)] for name, column in self._columns.items()},
                self._response[(*where, entry)],
                single_scope=self._single_scope,
            )
            for entry in range(self._used[point])
        )


def _weight(point: int) -> int:
    """What an application at a point counts: one too few here and one too many there do not cancel."""
    return 1_000_003 * point + 1


def _column(
    columns: Mapping[str, npt.NDArray[np.int32]], response: npt.NDArray[np.float32], *, single_scope: bool
) -> Column:
    """One entry of every token's slot."""
    kind = columns["kind"]
    fields: dict[str, Any] = {
        name: torch.from_numpy(values) if (values != neutral).any() else None
        for name, values, neutral in zip(RESPONSE_NUMBERS, response.T, Response().numbers, strict=True)
    }
    for name in ("gain", "offset"):
        fields[name] = torch.from_numpy(response[:, RESPONSE_NUMBERS.index(name)])
    for name, bit in _BITS.items():
        fields[name] = None if (kind & bit).all() else torch.from_numpy((kind & bit) != 0)
    for name in ("write", "read", "replacement"):
        fields[name] = torch.from_numpy(columns[name]).to(torch.int64)
    scope = None if single_scope else torch.from_numpy(columns["scope"])
    return Column(kinds=int(np.bitwise_or.reduce(kind)), scope=scope, **fields)


def _kind(entries: Sequence[Entry], at: int) -> int:
    """The bits of one entry among those of its point."""
    entry = entries[at]
    bits = USED
    bits |= READS if entry.read != NONE else 0
    bits |= RELATIVE if entry.response.relative else 0
    bits |= REPLACES if entry.replacement != NONE else 0
    bits |= JOINED if entry.joined else 0
    bits |= LEADS if not entry.joined and at + 1 < len(entries) and entries[at + 1].joined else 0
    if entry.norm != NONE:
        bits |= MEASURES if at == 0 or entries[at - 1].norm != entry.norm else 0
        bits |= RESTORES if at + 1 == len(entries) or entries[at + 1].norm != entry.norm else 0
    return bits


def _stacked(tables: Sequence[Ints]) -> Ints:
    """Tables of replacements one below the other, as wide as the widest (one column at least)."""
    width = max(1, *(table.shape[1] for table in tables))
    padded = [np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=NONE) for table in tables]
    return np.concatenate(padded)
