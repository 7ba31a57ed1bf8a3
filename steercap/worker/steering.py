"""What is steered on this rank: configurations, the requests that use them, and the record of every row.

Number 4 to 7 in the life of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from steercap.core.messages import (
    Busy,
    Equip,
    Equipped,
    Owner,
    Placed,
    Settled,
    SteeringRecord,
    Unknown,
    Vectors,
    Wanted,
)
from steercap.core.plan import Plan
from steercap.core.program import NONE, Configuration, SteeringPlan, applications, scope_masks
from steercap.core.rows import Ints
from steercap.worker.edits import EditTables, StepEdits

#: Failed identities remembered; a client that hears of a failure uses another identity from then on.
TAINTS: Final = 4096


@dataclass(frozen=True)
class Slot:
    """A configuration on this rank.

    Args:
        configuration: the edits.
        digest: its digest.
        places: bank rows of each of its blobs.
    """

    configuration: Configuration
    digest: bytes
    places: tuple[tuple[int, ...], ...]


class Steered:
    """One sample of one request that is steered.

    Args:
        owner: whose rows.
        plan: the request.
        steering: its steering.
        slot: what its slot held when it was first scheduled, None if nothing.
    """

    def __init__(self, owner: Owner, plan: Plan, steering: SteeringPlan, slot: Slot | None) -> None:
        self.owner = owner
        self.steering = steering
        self.slot = slot
        self.failure: str | None = None
        self._masks = scope_masks(steering.scopes, plan.limit)
        self._computed = np.zeros(plan.limit, dtype=np.bool_)
        self._cached = np.zeros(plan.limit, dtype=np.bool_)
        self._next = 0
        self._replacements = {} if slot is None else _replacements(slot, steering)
        if slot is None or slot.digest != steering.configuration:
            self.slot = None
            self.failure = f"slot {steering.slot} does not hold this request's configuration"

    def place(self, start: int, first_token: int, count: int) -> StepEdits | None:
        """The tokens of a pass that some scope holds; from here on they count as computed, unless `fail` is called.

        Args:
            start: position of the request's first token in this pass.
            first_token: its place in the batch.
            count: tokens of the request in this pass.
        """
        stop = start + count
        if start > self._next:  # the runner has their keys and values already: the prefix cache
            self._cached[self._next : start] = True
        self._next = max(self._next, stop)
        self._computed[start:stop] = True
        masks = self._masks[start:stop]
        if len(masks) < count:
            self.fail(f"position {stop - 1} was computed, beyond the {len(self._masks)} the request can have")
            return None
        chosen = np.flatnonzero(masks)
        if self.slot is None or not len(chosen):
            return None
        replacements = np.full((len(chosen), self.slot.configuration.replacements), NONE, dtype=np.int64)
        for row, position in enumerate((chosen + start).tolist()) if self._replacements else ():
            if position in self._replacements:
                replacements[row] = self._replacements[position]
        return StepEdits(self.steering.slot, chosen + first_token, masks[chosen], replacements)

    def fail(self, reason: str) -> None:
        """An edit was not made; the first reason is kept."""
        self.failure = self.failure or reason

    def seal(self, total: int, points: Sequence[int], *, witness: bool) -> SteeringRecord:
        """What was done to the first `total` inputs."""
        computed, cached = self._computed[:total], self._cached[:total] & ~self._computed[:total]
        failure = self.failure
        missing = np.flatnonzero(~(computed | cached))
        if failure is None and len(missing):
            failure = f"{len(missing)} of {total} tokens were never computed, the first at position {missing[0]}"
        return SteeringRecord(
            owner=self.owner,
            computed=np.packbits(computed).tobytes(),
            rows=() if failure or self.slot is None else self._rows(computed, self.slot.configuration, points),
            failure=failure,
            witness=witness,
        )

    def _rows(
        self, computed: np.ndarray[tuple[int], np.dtype[np.bool_]], configuration: Configuration, points: Sequence[int]
    ) -> tuple[int, ...]:
        """Rows that each edit touched at these points."""
        masks = self._masks[: len(computed)][computed]
        positions = [int(((masks >> scope) & 1).sum()) for scope in range(configuration.scopes)]
        return tuple((applications(configuration, points) @ np.array(positions)).tolist())


class Steering:
    """All that is steered on one rank.

    Args:
        points: indices of this rank's points among the engine's armed points.
        tables: where the taps look.
        witness: whether this rank's rows count for the receipt: rank 0 of its tensor-parallel group.
    """

    def __init__(self, points: Sequence[int], tables: EditTables, *, witness: bool) -> None:
        self.points = tuple(points)
        self.tables = tables
        self.witness = witness
        self._slots: dict[int, Slot] = {}
        self._rows: dict[int, tuple[bytes, int]] = {}  # which row of which blob each bank row holds
        self._by_request: dict[str, Steered] = {}
        self._records: dict[Owner, Steered] = {}
        #: What KV was written while steering failed, and why; the client never asks for it again.
        self._tainted: dict[bytes, str] = {}
        self._in_step: list[tuple[Steered, int]] = []

    # The client's calls

    def equip(self, question: Equip) -> Equipped | Busy:
        """Write vectors and configurations, unless a request that runs still uses what they would displace."""
        vectors = [item for item in question.vectors if not self._holds(item)]
        configurations = [item for item in question.configurations if self._slots.get(item.slot) != _slot(item)]
        running = {steered.steering.slot: steered.slot for steered in self._by_request.values() if steered.slot}
        rows = {row for slot in running.values() for blob in slot.places for row in blob}
        if running.keys() & {item.slot for item in configurations}:
            return Busy()
        if any(row in rows for item in vectors for row in item.places):
            return Busy()
        for item in vectors:
            values = torch.frombuffer(bytearray(item.data), dtype=torch.float32)
            self.tables.put(item.places, values.view(len(item.places), -1))
            self._rows.update((row, (item.digest, at)) for at, row in enumerate(item.places))
        for placed in configurations:
            self.tables.configure(placed.slot, placed.configuration, placed.places)
            self._slots[placed.slot] = _slot(placed)
        return Equipped()

    def _holds(self, vectors: Vectors) -> bool:
        return all(self._rows.get(row) == (vectors.digest, at) for at, row in enumerate(vectors.places))

    def settle(self, wanted: Iterable[Wanted]) -> Settled:
        """Say what was done to finished requests, and forget it."""
        records: list[SteeringRecord | Unknown] = []
        for item in wanted:
            steered = self._records.pop(item.owner, None)
            if steered is None:
                records.append(Unknown(item.owner))
                continue
            if steered.steering.identity in self._tainted:
                steered.fail(self._tainted[steered.steering.identity])
            records.append(steered.seal(item.total, self.points, witness=self.witness))
        return Settled(tuple(records))

    def release(self, owners: Iterable[Owner]) -> None:
        """Nobody will settle these."""
        for owner in owners:
            self._records.pop(owner, None)

    @property
    def held(self) -> int:
        """Requests whose record is kept."""
        return len(self._records)

    # The step

    def register(self, request_id: str, owner: Owner, plan: Plan, steering: SteeringPlan) -> None:
        """A steered request is scheduled for the first time (or again, after preemption)."""
        if request_id in self._by_request:
            return
        steered = Steered(owner, plan, steering, self._slots.get(steering.slot))
        self._by_request[request_id] = self._records[owner] = steered
        if steered.failure:
            self._fail(steered, steered.failure)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests will not run again."""
        for request_id in request_ids:
            self._by_request.pop(request_id, None)

    def steers(self, request_id: str) -> bool:
        """Whether this request is steered."""
        return request_id in self._by_request

    def place(self, request_id: str, start: int, first_token: int, count: int) -> StepEdits | None:
        """The edits of one request in the pass that is about to run."""
        steered = self._by_request.get(request_id)
        if steered is None:
            return None
        step = steered.place(start, first_token, count)
        if step is not None:
            self._in_step.append((steered, len(step.tokens)))
        elif steered.failure:
            self._fail(steered, steered.failure)
        return step

    def fail_request(self, request_id: str, reason: str) -> None:
        """A request's tokens are not those that were scheduled."""
        self._fail(self._by_request[request_id], reason)

    def end_step(self, applied: Ints, reason: str | None) -> None:
        """See that every token got its edits.

        Args:
            applied: whether each steered token did, bool [steered], in the order of the requests placed.
            reason: why the whole pass cannot be trusted, or None.
        """
        first = 0
        for steered, count in self._in_step:
            missed = count - int(applied[first : first + count].sum())
            first += count
            if reason or missed:
                self._fail(steered, reason or f"{missed} of {count} tokens of a pass did not get their edits")
        self._in_step = []

    def _fail(self, steered: Steered, reason: str) -> None:
        steered.fail(reason)
        self._tainted.setdefault(steered.steering.identity, reason)
        if len(self._tainted) > TAINTS:
            del self._tainted[next(iter(self._tainted))]


def _slot(placed: Placed) -> Slot:
    return Slot(placed.configuration, placed.configuration.digest, placed.places)


def _replacements(slot: Slot, steering: SteeringPlan) -> dict[int, Ints]:
    """The bank row that each replacement puts at a position, NONE for none: int64 [replacements] by position."""
    found: dict[int, Ints] = {}
    blobs = {entry.replacement: entry.write for entry in slot.configuration.entries if entry.replacement != NONE}
    for number, positions in enumerate(steering.replaced):
        for row, position in zip(slot.places[blobs[number]], positions, strict=True):
            found.setdefault(position, np.full(len(steering.replaced), NONE, dtype=np.int64))[number] = row
    return found
