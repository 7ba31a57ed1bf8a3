"""Slots and bank rows: counted, shared, reused, and never given twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from steercap.core.program import Blob, Configuration, Entry
from steercap.core.slots import Grant, Slots

SLOTS, ROWS = 3, 8


def configuration(name: int, blobs: tuple[tuple[int, int], ...]) -> Configuration:
    """A configuration that no other name gives, of blobs (name, rows)."""
    entries = (Entry(0, (name,), 0, 0),)
    return Configuration(entries, tuple(Blob(bytes([blob]), rows) for blob, rows in blobs), 1, 0)


#: Blob `n` always has `1 + n % 3` rows.
KNOWN = [
    configuration(name, tuple((blob, 1 + blob % 3) for blob in blobs))
    for name, blobs in enumerate(([0], [1], [0, 1], [2], [3, 4], [2, 5], [5], [6, 0]))
]


class Model(RuleBasedStateMachine):
    """Claims and releases in any order, against what a worker would hold after each Configure."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(SLOTS, ROWS)
        self.grants: list[Grant] = []
        self.worker_slots: dict[int, bytes] = {}
        self.worker_rows: dict[int, tuple[bytes, int]] = {}

    @rule(which=st.integers(0, len(KNOWN) - 1))
    def claim(self, which: int) -> None:
        grant = self.slots.claim(KNOWN[which], KNOWN[which].digest)
        used = {held.digest for held in self.grants}
        rows = {blob.digest: blob.rows for held in self.grants for blob in held.configuration.blobs}
        rows |= {blob.digest: blob.rows for blob in KNOWN[which].blobs}
        fits = len(used | {KNOWN[which].digest}) <= SLOTS and sum(rows.values()) <= ROWS
        assert (grant is not None) == fits, "what fits is granted, what does not is not"
        if grant is None:
            return
        missing = self.slots.unsent(grant)
        if missing is not None:
            for blob, places in zip(grant.configuration.blobs, grant.bank_rows, strict=True):
                if blob in missing:
                    self.worker_rows.update((place, (blob.digest, at)) for at, place in enumerate(places))
            self.worker_slots[grant.slot] = grant.digest
            self.slots.confirm(grant)
        self.grants.append(grant)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def release(self, data) -> None:
        self.slots.release(self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1))))

    @invariant()
    def workers_hold_what_is_granted(self) -> None:
        """Every configuration in use is in its slot, every row of its blobs in its place."""
        for grant in self.grants:
            assert self.worker_slots[grant.slot] == grant.digest
            for blob, places in zip(grant.configuration.blobs, grant.bank_rows, strict=True):
                assert [self.worker_rows[place] for place in places] == [(blob.digest, at) for at in range(blob.rows)]

    @invariant()
    def counts_are_those_of_the_users(self) -> None:
        """Slots and rows in use are those of what somebody holds."""
        assert self.slots.slots_in_use == len({grant.digest for grant in self.grants})
        rows = {blob.digest: blob.rows for grant in self.grants for blob in grant.configuration.blobs}
        assert self.slots.rows_in_use == sum(rows.values())


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_configuration_is_sent_again_once_its_vectors_were_overwritten() -> None:
    """Also where they are back in the same bank rows: the workers dropped it when others were written there."""
    slots = Slots(4, 1)
    first, other, scaled = configuration(0, ((1, 1),)), configuration(1, ((2, 1),)), configuration(2, ((1, 1),))
    for name, one in ((b"c", first), (b"e", other), (b"d", scaled)):
        grant = slots.claim(one, name)
        assert grant is not None
        assert slots.unsent(grant) is not None
        slots.confirm(grant)
        slots.release(grant)
    again = slots.claim(first, b"c")
    assert again is not None
    assert again.bank_rows == ((0,),)
    assert slots.unsent(again) == ()  # its vector is there


def test_what_is_used_again_is_not_sent_again() -> None:
    """Released vectors stay until their place is needed; a configuration larger than the bank never fits."""
    slots = Slots(2, 4)
    grant = slots.claim(KNOWN[0], KNOWN[0].digest)
    assert slots.unsent(grant) is not None
    slots.confirm(grant)
    slots.release(grant)
    assert slots.unsent(slots.claim(KNOWN[0], KNOWN[0].digest)) is None
    assert not slots.can_ever_hold({b"9": configuration(9, ((7, 5),))})
