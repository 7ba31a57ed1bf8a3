"""What is steered on this rank: configurations, the requests that use them, and the record of every row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.biases import Bias, bias_masks
from steercap.core.messages import (
    Configure,
    Configured,
    Owner,
    Settle,
    Settled,
    SteeringRecord,
    Unknown,
    Vectors,
)
from steercap.core.plan import Plan
from steercap.core.program import NONE, Configuration, SteeringPlan, blob_digest, rows_touched, scope_masks
from steercap.core.rows import Ints, ends_of_runs
from steercap.errors import WorkerFailure
from steercap.worker.bounds import check_configure
from steercap.worker.taps.base import Taps

#: How many failed identities are remembered; once there are as many, nothing is trusted any more.
TAINTS: Final = 65_536


@dataclass(frozen=True)
class Slot:
    """A configuration on this rank.

    Args:
        configuration: the edits.
        digest: its digest.
        bank_rows: of each of its blobs.
        addends: what its biases add to logits, by the mask of their scopes; see `worker.biasing`.
    """

    configuration: Configuration
    digest: bytes
    bank_rows: tuple[tuple[int, ...], ...]
    addends: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)


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
        self._limit = plan.limit
        self._since: int | None = None if steering.held else 0
        self._masks = scope_masks((steering.since(None) if steering.held else steering).scopes, plan.limit)
        self._computed = np.zeros(plan.limit, dtype=np.bool_)
        self._cached = np.zeros(plan.limit, dtype=np.bool_)
        self._next = 0
        if slot is None or slot.digest != steering.configuration:
            self.slot, self._replacements = None, {}
            self.failure = f"slot {steering.slot} does not hold this request's configuration"
        else:
            self._replacements = _replacements(slot, steering)
        replaced = np.array(sorted(self._replacements), dtype=np.int64)
        self._stops = np.union1d(ends_of_runs(self._masks), replaced)
        self._bias_masks = bias_masks(steering.biased, plan.prompt_len, plan.limit)
        #: Logits that were biased at each position: int32 [limit].
        self._entries = np.zeros(plan.limit if self.biases else 0, dtype=np.int32)
        #: The highest id of a token that a bias names.
        self.highest = max((int(bias.entries[0][-1]) for bias in self.biases), default=NONE)

    @property
    def biases(self) -> tuple[Bias, ...]:
        """What its slot says of logits."""
        return () if self.slot is None else self.slot.configuration.biases

    def begin(self, start: int, count: int) -> npt.NDArray[np.int32]:
        """The scopes that hold the tokens of a pass, int32 [count]; from here on they count as computed.

        Args:
            start: position of the request's first token in this pass.
            count: tokens of the request in this pass.
        """
        self.ran(start, start + count)
        masks = np.zeros(count, dtype=np.int32)
        if self.slot is not None:
            # Drafts and what follows a stop string may lie beyond all the request can keep.
            held = self._masks[start : start + count]
            masks[: len(held)] = held
        return masks

    def ran(self, start: int, stop: int) -> None:
        """The tokens of these positions are computed, with the edits that `begin` and `ahead` say."""
        if start > self._next:  # the runner has their keys and values already: the prefix cache
            self._cached[self._next : start] = True
        self._next = max(self._next, stop)
        self._computed[start:stop] = True

    def ahead(self, start: int) -> tuple[int, int]:
        """The next position in other scopes than `start`, or that is replaced; and the scopes that hold `start`."""
        run = int(np.searchsorted(self._stops, start, side="right"))
        if run == len(self._stops) or start in self._replacements:
            return start, 0
        return int(self._stops[run]), int(self._masks[start]) if self.slot is not None else 0

    def replaced(self, positions: Ints) -> dict[int, Ints]:
        """The bank row that each replacement puts at some of `positions`, by their index there, NONE for none."""
        if not self._replacements:
            return {}
        found = enumerate(positions.tolist())
        return {index: self._replacements[position] for index, position in found if position in self._replacements}

    def bias_mask(self, position: int) -> int:
        """The scopes of biases that hold a position, 0 if its logits are left alone."""
        return int(self._bias_masks[position]) if position < len(self._bias_masks) else 0

    def engage(self) -> int:
        """Let edits begin that were held back, with the next token; returns its position. Idempotent."""
        if self._since is None:
            self._since = self._next
            self._masks = scope_masks(self.steering.since(self._since).scopes, self._limit)
            self._stops = ends_of_runs(self._masks)
        return self._since

    def put(self, position: int, entries: int) -> None:
        """So many logits of this position were biased; those of a draft that was rejected come again."""
        self._entries[position] = entries

    def fail(self, reason: str) -> None:
        """An edit was not made; the first reason is kept."""
        self.failure = self.failure or reason

    def seal(self, total: int, points: Sequence[int], *, primary: bool, samples: bool) -> SteeringRecord:
        """What was done to the first `total` inputs."""
        computed, cached = self._computed[:total], self._cached[:total] & ~self._computed[:total]
        failure = self.failure
        missing = np.flatnonzero(~(computed | cached))
        if failure is None and len(missing):
            failure = f"{len(missing)} of {total} tokens were never computed, the first at position {missing[0]}"
        rows: tuple[int, ...] = ()
        if failure is None and self.slot is not None:
            rows = rows_touched(self.slot.configuration, points, self._masks[:total][computed])
        return SteeringRecord(
            owner=self.owner,
            computed=np.packbits(computed).tobytes(),
            rows=rows,
            failure=failure,
            primary=primary,
            biased=np.packbits(self._entries[:total] > 0).tobytes() if samples else None,
            entries=int(self._entries[:total].sum()),
        )


class Steering:
    """All that is steered on one rank.

    Args:
        taps: where configurations and vectors go.
        primary: whether this is rank 0 of its tensor-parallel group, whose rows count in the receipt.
        samples: whether logits are made here: on the last pipeline stage.
    """

    def __init__(self, taps: Taps, *, primary: bool, samples: bool) -> None:
        self.points = taps.points
        self.taps = taps
        self.primary = primary
        self.samples = samples
        self._slots: dict[int, Slot] = {}
        self._rows: dict[int, tuple[bytes, int]] = {}  # which row of which blob each bank row holds
        self._records: dict[Owner, Steered] = {}
        #: Identities under which keys and values were written while steering failed, and why; the client does not use
        #: them again.
        self._tainted: dict[bytes, str] = {}

    # The client's calls

    def configure(self, question: Configure, held: Mapping[int, Slot]) -> Configured:
        """Write vectors and configurations where no request that runs uses what they would displace.

        Args:
            question: what is to be written.
            held: the slots that requests that run use, and what each holds.

        Raises:
            WorkerFailure: a vector is not what its digest says, or something does not fit the tables.
        """
        check_configure(question, self.taps.sizes, self.taps.installed.bank_width)
        used = {row for slot in held.values() for blob in slot.bank_rows for row in blob}
        for vectors in question.vectors:
            if not self._holds(vectors.digest, vectors.bank_rows) and not used.intersection(vectors.bank_rows):
                self._put(vectors)
        refused = []
        for placed in question.configurations:
            slot = Slot(placed.configuration, placed.configuration.digest, placed.bank_rows)
            if self._slots.get(placed.slot) == slot:
                continue
            blobs = zip(placed.configuration.blobs, placed.bank_rows, strict=True)
            if placed.slot in held or not all(self._holds(blob.digest, rows) for blob, rows in blobs):
                refused.append(slot.digest)
                continue
            self._slots.pop(placed.slot, None)  # until it is written as a whole
            self.taps.configure(placed.slot, placed.configuration, placed.bank_rows)
            self._slots[placed.slot] = slot
        return Configured(tuple(refused))

    def _put(self, vectors: Vectors) -> None:
        """Write vectors; configurations that used what was there before are gone."""
        if blob_digest(vectors.data, len(vectors.bank_rows)) != vectors.digest:
            raise WorkerFailure("vectors arrived that are not what their SHA-256 says")
        values = torch.frombuffer(bytearray(vectors.data), dtype=torch.float32)
        self.taps.put(vectors.bank_rows, values.view(len(vectors.bank_rows), -1))
        self._rows.update((row, (vectors.digest, at)) for at, row in enumerate(vectors.bank_rows))
        written = set(vectors.bank_rows)
        for number, slot in list(self._slots.items()):
            if any(written.intersection(rows) for rows in slot.bank_rows):
                del self._slots[number]

    def _holds(self, digest: bytes, bank_rows: Sequence[int]) -> bool:
        return all(self._rows.get(row) == (digest, at) for at, row in enumerate(bank_rows))

    def settle(self, question: Settle) -> Settled:
        """Say what was done to requests, and forget those that have ended."""
        if len(question.wanted) != len(question.ended):
            raise WorkerFailure(f"{len(question.wanted)} requests are to be settled, {len(question.ended)} ends known")
        records: list[SteeringRecord | Unknown] = []
        for item, ended in zip(question.wanted, question.ended, strict=True):
            steered = self._records.pop(item.owner, None) if ended else self._records.get(item.owner)
            if steered is None:
                records.append(Unknown(item.owner))
                continue
            if reason := self._tainting(steered.steering.identity):
                steered.fail(reason)
            records.append(steered.seal(item.total, self.points, primary=self.primary, samples=self.samples))
        return Settled(tuple(records))

    def _tainting(self, identity: bytes) -> str | None:
        """Why what was written under an identity cannot be trusted."""
        if len(self._tainted) >= TAINTS:
            return f"edits failed for {TAINTS} requests or more; start the engine anew"
        return self._tainted.get(identity)

    def release(self, owners: Iterable[Owner]) -> None:
        """Nobody will settle these."""
        for owner in owners:
            self._records.pop(owner, None)

    @property
    def held(self) -> int:
        """Requests whose record is kept."""
        return len(self._records)

    # The step

    def register(self, owner: Owner, plan: Plan, steering: SteeringPlan) -> Steered:
        """A steered request is scheduled for the first time."""
        steered = Steered(owner, plan, steering, self._slots.get(steering.slot))
        self._records[owner] = steered
        if steered.failure:
            self.fail(steered, steered.failure)
        return steered

    def slot(self, number: int, configuration: bytes) -> Slot | None:
        """What a slot holds, if it is the configuration of this digest."""
        slot = self._slots.get(number)
        return slot if slot is not None and slot.digest == configuration else None

    def record(self, owner: Owner) -> Steered | None:
        """The record of a request, if it is kept."""
        return self._records.get(owner)

    def fail(self, steered: Steered, reason: str) -> None:
        """Edits were not made: what the request wrote is never to be read."""
        steered.fail(reason)
        self.taint(steered.steering, reason)

    def taint(self, steering: SteeringPlan, reason: str) -> None:
        """What is written under the identity of this steering is never to be read."""
        if steering.scopes and len(self._tainted) < TAINTS:  # biases of logits write nothing
            self._tainted.setdefault(steering.identity, reason)


def _replacements(slot: Slot, steering: SteeringPlan) -> dict[int, Ints]:
    """The bank row that each replacement puts at a position, NONE for none: int64 [replacements] by position."""
    found: dict[int, Ints] = {}
    blobs = {entry.replacement: entry.write for entry in slot.configuration.entries if entry.replacement != NONE}
    for number, positions in enumerate(steering.replaced):
        for row, position in zip(slot.bank_rows[blobs[number]], positions, strict=True):
            found.setdefault(position, np.full(len(steering.replaced), NONE, dtype=np.int64))[number] = row
    return found
