"""Store of captures that wait to be fetched; each belongs to one key, expires, and counts against limits."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from steercap.errors import CaptureMemoryFull

#: Seconds until a capture expires.
TIME_TO_LIVE: Final = 600.0
#: Maximum bytes of waiting captures, of all keys and of each.
MOST_BYTES: Final = 4 << 30
MOST_BYTES_OF_A_KEY: Final = 1 << 30


def owner_of(authorization: str) -> str:
    """Return the owner of a request: a digest of its `Authorization` header, "" without one.

    Names of schemes are case-insensitive, as in vLLM.
    """
    scheme, _, said = authorization.partition(" ")
    return hashlib.sha256(f"{scheme.lower()} {said}".encode()).hexdigest() if authorization else ""


@dataclass(frozen=True)
class WaitingCapture:
    """Capture that waits to be fetched.

    Args:
        name: unguessable id.
        owner: its owner.
        content: safetensors file, as `CaptureHandle.save` would write it.
        until: time of expiry, in seconds of the store's clock.
    """

    name: str
    owner: str
    content: bytes
    until: float

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.content)


class CaptureStore:
    """Store of the captures of a server.

    Args:
        time_to_live: seconds until each expires.
        most_bytes: maximum bytes of all waiting captures.
        most_of_a_key: maximum bytes of one owner's.
        clock: function that returns the time in seconds.
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
        self._waiting: dict[str, WaitingCapture] = {}  # in order of expiry, since all have the same time to live

    def put(self, content: bytes, owner: str) -> WaitingCapture:
        """Store a file.

        Raises:
            CaptureMemoryFull: a limit leaves no room for it.
        """
        self.require_room(owner, len(content))
        one = WaitingCapture(f"cap-{secrets.token_hex(16)}", owner, content, self._clock() + self.time_to_live)
        self._waiting[one.name] = one
        return one

    def require_room(self, owner: str, size: int = 0) -> None:
        """Check that an owner may store `size` bytes more.

        Raises:
            CaptureMemoryFull: a limit leaves no room.
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
        """Return the bytes of waiting captures, of one owner or of all."""
        self.sweep()
        return sum(one.size for one in self._waiting.values() if owner is None or one.owner == owner)

    def get(self, name: str, owner: str) -> WaitingCapture | None:
        """Return an owner's capture; None if there is none of the name, or it is another owner's."""
        self.sweep()
        one = self._waiting.get(name)
        return one if one is not None and secrets.compare_digest(one.owner, owner) else None

    def remove(self, name: str, owner: str) -> bool:
        """Remove an owner's capture; return whether it existed."""
        if self.get(name, owner) is None:
            return False
        del self._waiting[name]
        return True

    def of(self, owner: str) -> Iterator[WaitingCapture]:
        """Iterate over an owner's captures, in order of expiry."""
        self.sweep()
        return (one for one in tuple(self._waiting.values()) if one.owner == owner)

    def expires_in(self, one: WaitingCapture) -> float:
        """Return the seconds until a capture expires."""
        return max(0.0, one.until - self._clock())

    def sweep(self) -> None:
        """Remove expired captures."""
        now = self._clock()
        while self._waiting:
            first = next(iter(self._waiting.values()))
            if first.until > now:
                return
            del self._waiting[first.name]
