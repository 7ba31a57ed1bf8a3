"""Bookkeeping of the workers' slots for configurations and bank rows for vectors, with reference counts.

The client does it for all workers alike: it decides what must be sent and what may be overwritten. Unused contents stay
until their place is needed; the least recently used is overwritten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from steercap.core.program import Blob, Configuration


@dataclass(eq=False)
class _Content:
    """Content of a slot (a configuration) or of bank rows (a blob), and the number of its users.

    Args:
        places: indices of the slot or bank rows that it occupies.
        users: number of requests that use it.
        sent: None until sent to the workers; then True for a blob, and for a configuration the `_Content` of each of
            its blobs at that time, since workers drop a configuration whose blobs are overwritten.
    """

    places: tuple[int, ...]
    users: int = 0
    sent: object = None


class _PlacePool:
    """Places of one kind, slots or bank rows, numbered from 0 to `places` - 1, and their contents by digest."""

    def __init__(self, places: int) -> None:
        self.total = places
        self.contents: dict[bytes, _Content] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._free = list(range(places - 1, -1, -1))
        self._idle_places = 0

    @property
    def in_use(self) -> int:
        """Number of places whose contents have users."""
        return self.total - len(self._free) - self._idle_places

    def room(self, wanted: Iterable[tuple[bytes, int]]) -> bool:
        """Check if contents, given as (digest, number of places), fit beside all contents with users."""
        missing = reusable = 0
        for digest, places in wanted:
            if digest not in self.contents:
                missing += places
            elif not self.contents[digest].users:
                reusable += places
        return missing <= len(self._free) + self._idle_places - reusable

    def take(self, digest: bytes, places: int) -> _Content:
        """Add a user to the content with this digest, in its present places or in new ones, and return the content."""
        content = self.contents.get(digest)
        if content is None:
            while len(self._free) < places:
                self._free.extend(self.contents.pop(self._remove_idle(next(iter(self._idle)))).places)
            content = self.contents[digest] = _Content(tuple(self._free.pop() for _ in range(places)))
        elif not content.users:
            self._remove_idle(digest)
        content.users += 1
        return content

    def release(self, digest: bytes) -> None:
        """Remove a user from the content with this digest; contents without users may be overwritten."""
        content = self.contents[digest]
        content.users -= 1
        if not content.users:
            self._idle[digest] = None
            self._idle_places += len(content.places)

    def _remove_idle(self, digest: bytes) -> bytes:
        del self._idle[digest]
        self._idle_places -= len(self.contents[digest].places)
        return digest


@dataclass(frozen=True, eq=False)
class Grant:
    """A configuration's slot and bank rows, reserved until `Slots.release`; `bank_rows` are those of each blob."""

    configuration: Configuration
    digest: bytes
    slot: int
    bank_rows: tuple[tuple[int, ...], ...]


class Slots:
    """Reservations of an engine's slots and bank rows.

    Args:
        slots: number of slots, each for one configuration.
        rows: number of rows of the vector bank.
    """

    def __init__(self, slots: int, rows: int) -> None:
        self._slots = _PlacePool(slots)
        self._bank = _PlacePool(rows)
        #: Grants in use, by digest; and digests of those that the workers have. Each grant is one user of its blobs.
        self._granted: dict[bytes, Grant] = {}
        self._confirmed: set[bytes] = set()

    @property
    def slots(self) -> int:
        """Number of slots, each for one configuration."""
        return self._slots.total

    @property
    def rows(self) -> int:
        """Number of rows of the vector bank."""
        return self._bank.total

    @property
    def slots_in_use(self) -> int:
        """Number of slots whose configuration has users."""
        return self._slots.in_use

    @property
    def rows_in_use(self) -> int:
        """Number of bank rows whose vectors have users."""
        return self._bank.in_use

    def can_ever_hold(self, wanted: Mapping[bytes, Configuration]) -> bool:
        """Check if these configurations, by digest, fit together into empty slots and an empty bank."""
        return len(wanted) <= self.slots and sum(_blobs(wanted.values()).values()) <= self.rows

    def claim_all(self, wanted: Mapping[bytes, Configuration]) -> list[Grant] | None:
        """Reserve places for all these configurations, by digest; return the grants, or None if they do not all fit."""
        fits = all(digest in self._granted for digest in wanted) or (
            self._slots.room((digest, 1) for digest in wanted) and self._bank.room(_blobs(wanted.values()).items())
        )
        if not fits:
            return None
        grants = [self.claim(configuration, digest) for digest, configuration in wanted.items()]
        return [grant for grant in grants if grant is not None]

    def claim(self, configuration: Configuration, digest: bytes) -> Grant | None:
        """Add a user to a configuration and reserve its places; None if those in use leave no room."""
        if digest in self._granted:
            self._slots.take(digest, 1)
            return self._granted[digest]
        blobs = [(blob.digest, blob.rows) for blob in configuration.blobs]
        if not self._slots.room([(digest, 1)]) or not self._bank.room(blobs):
            return None
        slot = self._slots.take(digest, 1).places[0]
        # Blobs that are in the bank come first, so that new ones cannot displace them.
        known = sorted(blobs, key=lambda blob: blob[0] not in self._bank.contents)
        bank_rows = {blob: self._bank.take(blob, rows).places for blob, rows in known}
        grant = Grant(configuration, digest, slot, tuple(bank_rows[blob] for blob, _ in blobs))
        self._granted[digest] = grant
        return grant

    def unsent(self, grant: Grant) -> tuple[Blob, ...] | None:
        """Return the blobs to send before the configuration can run, perhaps (); None if the workers have it all."""
        if grant.digest in self._confirmed:
            return None
        missing = tuple(blob for blob in grant.configuration.blobs if not self._bank.contents[blob.digest].sent)
        return missing if missing or self._slots.contents[grant.digest].sent != self._entries(grant) else None

    def confirm(self, grant: Grant) -> None:
        """Record that the workers have the configuration and its blobs."""
        self._slots.contents[grant.digest].sent = self._entries(grant)
        for blob in grant.configuration.blobs:
            self._bank.contents[blob.digest].sent = True
        if grant.digest in self._granted:
            self._confirmed.add(grant.digest)

    def _entries(self, grant: Grant) -> tuple[_Content, ...]:
        return tuple(self._bank.contents[blob.digest] for blob in grant.configuration.blobs)

    def release(self, grant: Grant) -> None:
        """Remove a user of the configuration; the last one's release frees its places for other configurations."""
        self._slots.release(grant.digest)
        if self._slots.contents[grant.digest].users:
            return
        del self._granted[grant.digest]
        self._confirmed.discard(grant.digest)
        for blob in grant.configuration.blobs:
            self._bank.release(blob.digest)


def _blobs(configurations: Iterable[Configuration]) -> dict[bytes, int]:
    """Return the number of bank rows of each blob of some configurations, by digest."""
    return {blob.digest: blob.rows for configuration in configurations for blob in configuration.blobs}
