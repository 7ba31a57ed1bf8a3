"""Captures that wait to be fetched: each belongs to one key, has a time to live, and counts against a limit."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from steercap.errors import CaptureMemoryFull

#: Seconds that a capture waits.
TIME_TO_LIVE: Final = 600.0
#: Bytes of rows that may wait, of all keys and of each.
MOST_BYTES: Final = 4 << 30
MOST_BYTES_OF_A_KEY: Final = 1 << 30


def owner_of(authorization: str) -> str:
    """Whose a request is: the digest of what its `Authorization` header says, "" for none.

    The name of a scheme means the same in capitals, and so vLLM reads it.
    """
    scheme, _, said = authorization.partition(" ")
    return hashlib.sha256(f"{scheme.lower()} {said}".encode()).hexdigest() if authorization else ""


@dataclass(frozen=True)
class Waiting:
    """A capture that waits.

    Args:
        name: its id, which cannot be guessed.
        owner: whose it is.
        content: the safetensors file that `CaptureHandle.save` would write.
        until: when it goes, in seconds of the store's clock.
    """

    name: str
    owner: str
    content: bytes
    until: float

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.content)


class Captures:
    """The captures of a server.

    Args:
        time_to_live: seconds that each waits.
        most_bytes: bytes of rows that wait at once.
        most_of_a_key: of these, those of one owner.
        clock: gives the time in seconds.
    """

    def __init__(
        self,
        *,
        time_to_live: float = TIME_TO_LIVE,
        most_bytes: int = MOST_BYTES,
        most_of_a_key: int = MOST_BYTES_OF_A_KEY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.time_to_live = time_to_live
        self.most_bytes = most_bytes
        self.most_of_a_key = most_of_a_key
        self._clock = clock
        self._waiting: dict[str, Waiting] = {}  # in the order of their ends: all live as long

    def put(self, content: bytes, owner: str) -> Waiting:
        """Keep a file.

        Raises:
            CaptureMemoryFull: there is no room for it.
        """
        self.require_room(owner, len(content))
        one = Waiting(f"cap-{secrets.token_hex(16)}", owner, content, self._clock() + self.time_to_live)
        self._waiting[one.name] = one
        return one

    def require_room(self, owner: str, size: int = 0) -> None:
        """Check that a key may keep more.

        Raises:
            CaptureMemoryFull: it may not.
        """
        self.sweep()
        held = self.held(owner)
        if held + size > self.most_of_a_key or (not size and held >= self.most_of_a_key):
            raise CaptureMemoryFull(
                f"{held:,} bytes of your captures wait to be fetched, and {self.most_of_a_key:,} may; DELETE those "
                f"that you do not need, or wait: each goes after {self.time_to_live:.0f} s"
            )
        total = self.held()
        if total + size > self.most_bytes:
            raise CaptureMemoryFull(
                f"{total:,} bytes of captures wait on this server, and {self.most_bytes:,} may; ask again in a while"
            )

    def held(self, owner: str | None = None) -> int:
        """Bytes of rows that wait, of one owner or of all."""
        self.sweep()
        return sum(one.size for one in self._waiting.values() if owner is None or one.owner == owner)

    def get(self, name: str, owner: str) -> Waiting | None:
        """One of an owner's own; None where there is none of the name, or it is another's."""
        self.sweep()
        one = self._waiting.get(name)
        return one if one is not None and secrets.compare_digest(one.owner, owner) else None

    def remove(self, name: str, owner: str) -> bool:
        """Let go of one of an owner's own; whether it was there."""
        if self.get(name, owner) is None:
            return False
        del self._waiting[name]
        return True

    def of(self, owner: str) -> Iterator[Waiting]:
        """Those of an owner, in the order of their ends."""
        self.sweep()
        return (one for one in tuple(self._waiting.values()) if one.owner == owner)

    def expires_in(self, one: Waiting) -> float:
        """Seconds until it goes."""
        return max(0.0, one.until - self._clock())

    def sweep(self) -> None:
        """Let go of those whose time is over."""
        now = self._clock()
        while self._waiting:
            first = next(iter(self._waiting.values()))
            if first.until > now:
                return
            del self._waiting[first.name]
