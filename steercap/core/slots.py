"""Which slot a configuration has, and where its vectors are: counted, shared, reused.

Pure bookkeeping, kept by the client for all workers alike: it decides what must be sent and what may be overwritten.
What is no longer used stays until its place is needed; the least recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from steercap.core.program import Blob, Configuration


@dataclass(eq=False)
class _Held:
    """A configuration in its slot, or a blob in its bank rows.

    Args:
        places: where it lies.
        users: requests that use it.
        sent: what the workers were told: that it is there, or, of a configuration, where its blobs are.
    """

    places: tuple[int, ...]
    users: int = 0
    sent: object = None


class _Shelf:
    """Places of one kind and what lies in them, by digest.

    Args:
        places: how many.
    """

    def __init__(self, places: int) -> None:
        self.total = places
        self.held: dict[bytes, _Held] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._free = list(range(places - 1, -1, -1))
        self._idle_places = 0

    @property
    def in_use(self) -> int:
        """Places whose contents have users."""
        return self.total - len(self._free) - self._idle_places

    def room(self, wanted: Iterable[tuple[bytes, int]]) -> bool:
        """Whether things that take so many places fit beside all that have users."""
        missing = reusable = 0
        for digest, places in wanted:
            if digest not in self.held:
                missing += places
            elif not self.held[digest].users:
                reusable += places
        return missing <= len(self._free) + self._idle_places - reusable

    def take(self, digest: bytes, places: int) -> _Held:
        """Use a thing, in its own places or in new ones."""
        held = self.held.get(digest)
        if held is None:
            while len(self._free) < places:
                self._free.extend(self.held.pop(self._unshelve(next(iter(self._idle)))).places)
            held = self.held[digest] = _Held(tuple(self._free.pop() for _ in range(places)))
        elif not held.users:
            self._unshelve(digest)
        held.users += 1
        return held

    def release(self, digest: bytes) -> None:
        """One user less; without users the thing may be displaced."""
        held = self.held[digest]
        held.users -= 1
        if not held.users:
            self._idle[digest] = None
            self._idle_places += len(held.places)

    def _unshelve(self, digest: bytes) -> bytes:
        del self._idle[digest]
        self._idle_places -= len(self.held[digest].places)
        return digest


@dataclass(frozen=True, eq=False)
class Grant:
    """A configuration's slot and bank rows, until `Slots.release`.

    Args:
        configuration: what it is for.
        digest: digest of the configuration.
        slot: its slot.
        bank_rows: of each of its blobs.
    """

    configuration: Configuration
    digest: bytes
    slot: int
    bank_rows: tuple[tuple[int, ...], ...]


class Slots:
    """Slots and bank rows of an engine.

    Args:
        slots: configurations held at once.
        rows: rows of the vector bank.
    """

    def __init__(self, slots: int, rows: int) -> None:
        self._slots = _Shelf(slots)
        self._bank = _Shelf(rows)

    @property
    def slots(self) -> int:
        """Configurations held at once."""
        return self._slots.total

    @property
    def rows(self) -> int:
        """Rows of the vector bank."""
        return self._bank.total

    @property
    def slots_in_use(self) -> int:
        """Slots whose configuration some request uses."""
        return self._slots.in_use

    @property
    def rows_in_use(self) -> int:
        """Bank rows whose vectors some request uses."""
        return self._bank.in_use

    def can_ever_hold(self, wanted: Mapping[bytes, Configuration]) -> bool:
        """Whether there is room for configurations, by their digests, when nobody else holds anything."""
        return len(wanted) <= self.slots and sum(_blobs(wanted.values()).values()) <= self.rows

    def claim_all(self, wanted: Mapping[bytes, Configuration]) -> list[Grant] | None:
        """Find places for all of some configurations, by their digests, or None if there is not room for all."""
        if not self._slots.room((digest, 1) for digest in wanted) or not self._bank.room(
            _blobs(wanted.values()).items()
        ):
            return None
        grants = [self.claim(configuration, digest) for digest, configuration in wanted.items()]
        return [grant for grant in grants if grant is not None]

    def claim(self, configuration: Configuration, digest: bytes) -> Grant | None:
        """Find places for a configuration, or None if what others use leaves no room."""
        blobs = [(blob.digest, blob.rows) for blob in configuration.blobs]
        if not self._slots.room([(digest, 1)]) or not self._bank.room(blobs):
            return None
        slot = self._slots.take(digest, 1).places[0]
        # What is there comes first, so that what is not there yet cannot displace it.
        known = sorted(blobs, key=lambda blob: blob[0] not in self._bank.held)
        bank_rows = {blob: self._bank.take(blob, rows).places for blob, rows in known}
        return Grant(configuration, digest, slot, tuple(bank_rows[blob] for blob, _ in blobs))

    def unsent(self, grant: Grant) -> tuple[Blob, ...] | None:
        """The blobs that must be sent before the configuration can run; None if it can run as it is."""
        missing = tuple(blob for blob in grant.configuration.blobs if not self._bank.held[blob.digest].sent)
        return missing if missing or self._slots.held[grant.digest].sent != grant.bank_rows else None

    def confirm(self, grant: Grant) -> None:
        """The workers hold the configuration and its blobs."""
        self._slots.held[grant.digest].sent = grant.bank_rows
        for blob in grant.configuration.blobs:
            self._bank.held[blob.digest].sent = True

    def release(self, grant: Grant) -> None:
        """One user less."""
        self._slots.release(grant.digest)
        for blob in grant.configuration.blobs:
            self._bank.release(blob.digest)


def _blobs(configurations: Iterable[Configuration]) -> dict[bytes, int]:
    """Bank rows of each blob of some configurations, by its digest."""
    return {blob.digest: blob.rows for configuration in configurations for blob in configuration.blobs}
