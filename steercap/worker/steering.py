"""Steering on this rank: configurations, the requests that use them, and a record of every edited row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from steercap.core.biases import Bias, bias_masks
from steercap.core.messages import (
    Configure,
    Configured,
    GetSteeringRecord,
    Owner,
    SteeringRecord,
    SteeringRecords,
    Unknown,
    Vectors,
)
from steercap.core.plan import Plan
from steercap.core.program import NONE, Configuration, SteeringPlan, blob_digest, rows_touched, scope_masks
from steercap.core.rows import Ints, ends_of_runs
from steercap.core.tokens import Range
from steercap.errors import WorkerFailure
from steercap.worker.bounds import check_configure
from steercap.worker.taps import Taps

#: Maximum number of identities with failed steering to remember; once reached, no identity is trusted.
TAINTS: Final = 65_536


@dataclass(frozen=True)
class Slot:
    """Contents of a slot: a configuration on this rank.

    Args:
        configuration: the edits.
        digest: SHA-256 of the configuration.
        bank_rows: vector-bank rows of each of the configuration's blobs.
        addends: cached sums of logit biases, by the bit mask of their scopes; see `worker.biasing`.
    """

    configuration: Configuration
    digest: bytes
    bank_rows: tuple[tuple[int, ...], ...]
    addends: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)


class SteeredSample:
    """Steering state of one sample of a request: the scopes of its tokens, and the positions that were computed.

    Args:
        owner: key of the request and number of the sample.
        plan: plan of the request.
        steering: the steering part of the plan.
        slot: contents of the plan's slot when the request was first scheduled, None if the slot was empty.
    """

    def __init__(self, owner: Owner, plan: Plan, steering: SteeringPlan, slot: Slot | None) -> None:
        self.owner = owner
        self.steering = steering
        self.slot = slot
        self.failure: str | None = None
        self.limit = plan.limit
        self._since: int | None = None if steering.held else 0
        scopes = (steering.since(None) if steering.held else steering).scopes
        self._masks, self._stops = scope_masks(scopes, plan.limit), _stops(scopes, plan.limit)
        self._computed = np.zeros(plan.limit, dtype=np.bool_)
        self._cached = np.zeros(plan.limit, dtype=np.bool_)
        self._next = 0
        if slot is None or slot.digest != steering.configuration:
            self.slot, self._replacements = None, {}
            self.failure = f"slot {steering.slot} does not hold this request's configuration"
        else:
            self._replacements = _replacements(slot, steering)
        if self._replacements:
            self._stops = np.union1d(self._stops, np.array(sorted(self._replacements), dtype=np.int64))
        self._bias_masks = bias_masks(steering.biased, plan.prompt_len, plan.limit)
        #: Number of biased logits at each position: int32 [limit].
        self._entries = np.zeros(plan.limit if self.biases else 0, dtype=np.int32)
        #: Highest token id of any bias, NONE if there is none.
        self.highest = max((int(bias.entries[0][-1]) for bias in self.biases), default=NONE)

    @property
    def biases(self) -> tuple[Bias, ...]:
        """Logit biases of the request's configuration."""
        return () if self.slot is None else self.slot.configuration.biases

    def begin(self, start: int, count: int) -> npt.NDArray[np.int32]:
        """Record the tokens of a pass as computed; return the bit mask of the scopes that select each: int32 [count].

        Args:
            start: position of the request's first token in this pass.
            count: tokens of the request in this pass.
        """
        self.mark_computed(start, start + count)
        masks = np.zeros(count, dtype=np.int32)
        if self.slot is not None:
            # Drafts, and tokens after a stop string, may lie beyond the request's limit.
            held = self._masks[start : start + count]
            masks[: len(held)] = held
        return masks

    def mark_computed(self, start: int, stop: int) -> None:
        """Record positions [start, stop) as computed, and those skipped before them as read from the prefix cache."""
        if start > self._next:  # the runner took their keys and values from the prefix cache
            self._cached[self._next : start] = True
        self._next = max(self._next, stop)
        self._computed[start:stop] = True

    def ahead(self, start: int) -> tuple[int, int]:
        """Return how far the tokens from position `start` on have equal scopes and no replacement, and these scopes.

        Returns:
            Position after the last such token, `start` if there is none; and the bit mask of the scopes, 0 if none.
        """
        run = int(self._stops.searchsorted(start, side="right"))
        if run == len(self._stops) or start in self._replacements:
            return start, 0
        return int(self._stops[run]), int(self._masks[start]) if self.slot is not None else 0

    def replaced(self, positions: Ints) -> dict[int, Ints]:
        """Return the bank rows of the replacements at those of `positions` that have any.

        Returns:
            int64 [replacements] by index in `positions`: row in the bank of each replacement, NONE for none.
        """
        if not self._replacements:
            return {}
        found = enumerate(positions.tolist())
        return {index: self._replacements[position] for index, position in found if position in self._replacements}

    def bias_mask(self, position: int) -> int:
        """Return the bit mask of the bias scopes that select a position, 0 if its logits are not biased."""
        return int(self._bias_masks[position]) if position < len(self._bias_masks) else 0

    def engage(self) -> int:
        """Start edits that were held back, at the next token to be computed; return its position. Idempotent."""
        if self._since is None:
            self._since = self._next
            scopes = self.steering.since(self._since).scopes
            self._masks, self._stops = scope_masks(scopes, self.limit), _stops(scopes, self.limit)
        return self._since

    def put(self, position: int, entries: int) -> None:
        """Record the number of biased logits at a position; after a rejected draft, the new number replaces it."""
        self._entries[position] = entries

    def fail(self, reason: str) -> None:
        """Record that an edit was not made; the first reason is kept."""
        self.failure = self.failure or reason

    def seal(self, total: int, points: Sequence[int], *, primary: bool, samples: bool) -> SteeringRecord:
        """Return the record of the edits of the first `total` inputs; a position neither computed nor cached fails it.

        Args:
            total: number of input tokens of the sequence.
            points: indices of the points of this rank at which edited rows are counted.
            primary: True if the rows of this rank count in the receipt.
            samples: True on the last pipeline stage, where logits are computed.
        """
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


@lru_cache(maxsize=256)
def _stops(scopes: tuple[tuple[Range, ...], ...], limit: int) -> Ints:
    """Return the end of each run of positions with the same scopes, ascending: int64 [runs]."""
    return ends_of_runs(scope_masks(scopes, limit))


class Steering:
    """Steering on one rank: the slots and the steered requests.

    Args:
        taps: taps whose tables hold the configurations and vectors.
        primary: True on rank 0 of a tensor-parallel group, whose rows count in the receipt.
        samples: True on the last pipeline stage, where logits are computed.
    """

    def __init__(self, taps: Taps, *, primary: bool, samples: bool) -> None:
        self.points = taps.points
        self.taps = taps
        self.primary = primary
        self.samples = samples
        self._slots: dict[int, Slot] = {}
        self._rows: dict[int, tuple[bytes, int]] = {}  # blob digest and row number of each bank row's contents
        self._records: dict[Owner, SteeredSample] = {}
        #: Identities under which keys and values were written while steering failed, with the reasons. The client does
        #: not use these identities again.
        self._tainted: dict[bytes, str] = {}

    # The client's calls

    def configure(self, question: Configure, held: Mapping[int, Slot]) -> Configured:
        """Write vectors and configurations, except to bank rows and slots that a running request uses.

        Args:
            question: the vectors and configurations to write.
            held: contents of the slots that running requests use, by number.

        Returns:
            Digests of the configurations that were not written.

        Raises:
            WorkerFailure: a vector does not match its digest, or something does not fit the tables.
        """
        check_configure(question, self.taps.sizes)
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
        """Write vectors to the bank, and drop the configurations that used the overwritten rows."""
        if blob_digest(vectors.data, len(vectors.bank_rows)) != vectors.digest:
            raise WorkerFailure("vectors arrived whose SHA-256 does not match")
        values = torch.frombuffer(bytearray(vectors.data), dtype=torch.float32)
        self.taps.put(vectors.bank_rows, values.view(len(vectors.bank_rows), -1))
        self._rows.update((row, (vectors.digest, at)) for at, row in enumerate(vectors.bank_rows))
        written = set(vectors.bank_rows)
        for number, slot in list(self._slots.items()):
            if any(written.intersection(rows) for rows in slot.bank_rows):
                del self._slots[number]

    def _holds(self, digest: bytes, bank_rows: Sequence[int]) -> bool:
        return all(self._rows.get(row) == (digest, at) for at, row in enumerate(bank_rows))

    def settle(self, question: GetSteeringRecord) -> SteeringRecords:
        """Return the records of wanted requests in order, `Unknown` without one; forget those that have ended."""
        if len(question.wanted) != len(question.ended):
            raise WorkerFailure(
                f"{len(question.wanted)} records are asked for, with {len(question.ended)} flags of whether their "
                "requests have ended"
            )
        records: list[SteeringRecord | Unknown] = []
        for item, ended in zip(question.wanted, question.ended, strict=True):
            steered = self._records.pop(item.owner, None) if ended else self._records.get(item.owner)
            if steered is None:
                records.append(Unknown(item.owner))
                continue
            if reason := self._tainting(steered.steering.identity):
                steered.fail(reason)
            records.append(steered.seal(item.total, self.points, primary=self.primary, samples=self.samples))
        return SteeringRecords(tuple(records))

    def _tainting(self, identity: bytes) -> str | None:
        """Return the reason why KV cache entries written under an identity cannot be trusted; None if they can."""
        if len(self._tainted) >= TAINTS:
            return f"edits failed for {TAINTS} requests or more; start the engine again"
        return self._tainted.get(identity)

    def release(self, owners: Iterable[Owner]) -> None:
        """Forget the records of requests, which the client will not ask for."""
        for owner in owners:
            self._records.pop(owner, None)

    @property
    def held(self) -> int:
        """Number of requests whose steering record is in memory."""
        return len(self._records)

    # The step

    def register(self, owner: Owner, plan: Plan, steering: SteeringPlan) -> SteeredSample:
        """Create the record of a steered request that is scheduled for the first time."""
        steered = SteeredSample(owner, plan, steering, self._slots.get(steering.slot))
        self._records[owner] = steered
        if steered.failure:
            self.fail(steered, steered.failure)
        return steered

    def slot(self, number: int, configuration: bytes) -> Slot | None:
        """Return the contents of a slot if its configuration has this SHA-256 digest, else None."""
        slot = self._slots.get(number)
        return slot if slot is not None and slot.digest == configuration else None

    def record(self, owner: Owner) -> SteeredSample | None:
        """Return the record of a request, None if there is none."""
        return self._records.get(owner)

    def fail(self, steered: SteeredSample, reason: str) -> None:
        """Record that edits of a request were not made, so that no KV cache entry that it wrote is reused."""
        steered.fail(reason)
        self.taint(steered.steering, reason)

    def taint(self, steering: SteeringPlan, reason: str) -> None:
        """Record that KV cache entries made under this steering's identity must not be reused.

        Does nothing for steering of logit biases alone. After `TAINTS` records no identity is trusted.
        """
        if steering.scopes and len(self._tainted) < TAINTS:  # biases of logits write nothing
            self._tainted.setdefault(steering.identity, reason)


def _replacements(slot: Slot, steering: SteeringPlan) -> dict[int, Ints]:
    """Return the bank rows of the replacements by token position: int64 [replacements], NONE if not replaced there."""
    found: dict[int, Ints] = {}
    blobs = {entry.replacement: entry.write for entry in slot.configuration.entries if entry.replacement != NONE}
    for number, positions in enumerate(steering.replaced):
        for row, position in zip(slot.bank_rows[blobs[number]], positions, strict=True):
            found.setdefault(position, np.full(len(steering.replaced), NONE, dtype=np.int64))[number] = row
    return found
