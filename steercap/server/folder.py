"""Captures on the server: a store of those that wait to be fetched, and the operator's folder.

In the store each capture belongs to an owner (API key), expires, and counts against limits. The folder is a run of
captures with a manifest, which `Manifest.load` reads.

File names are numbers that the run assigns: no client input becomes part of a path. A listed file is complete; a file
whose writing failed on a full disk is neither kept nor listed.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from steercap.captures.files import size_of
from steercap.captures.handle import CaptureHandle
from steercap.captures.manifest import ManifestRequest
from steercap.captures.saving import CaptureRun
from steercap.concurrency.loops import finished, on_thread
from steercap.errors import CaptureMemoryFull, ServerFailure

#: Default seconds until a waiting capture expires.
TIME_TO_LIVE: Final = 600.0
#: Default maximum bytes of waiting captures, of all API keys together and of each.
STORE_BYTES: Final = 4 << 30
KEY_BYTES: Final = 1 << 30


def owner_of(authorization: str) -> str:
    """Return the owner of a request: a digest of its `Authorization` header's value, "" without one.

    Names of schemes are case-insensitive, as in vLLM.
    """
    scheme, _, said = authorization.partition(" ")
    return hashlib.sha256(f"{scheme.lower()} {said}".encode()).hexdigest() if authorization else ""


@dataclass(frozen=True)
class WaitingCapture:
    """Capture in the store that waits to be fetched.

    Args:
        name: unguessable id.
        owner: digest of the API key, see `owner_of`.
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
    """Store in memory of captures that wait to be fetched.

    Args:
        time_to_live: seconds until each expires.
        most_bytes: maximum bytes of all captures.
        most_of_a_key: maximum bytes of one owner's captures.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        *,
        time_to_live: float = TIME_TO_LIVE,
        most_bytes: int = STORE_BYTES,
        most_of_a_key: int = KEY_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.time_to_live = time_to_live
        self.most_bytes = most_bytes
        self.most_of_a_key = most_of_a_key
        self._clock = clock
        self._waiting: dict[str, WaitingCapture] = {}  # in order of expiry, since all have the same time to live

    def put(self, content: bytes, owner: str) -> WaitingCapture:
        """Store a capture file of an owner; return its entry.

        Raises:
            CaptureMemoryFull: a limit leaves no room for it.
        """
        self.require_room(owner, len(content))
        capture = WaitingCapture(f"cap-{secrets.token_hex(16)}", owner, content, self._clock() + self.time_to_live)
        self._waiting[capture.name] = capture
        return capture

    def require_room(self, owner: str, size: int = 0) -> None:
        """Check that an owner may store `size` bytes more; 0: that the owner's limit is not reached.

        Raises:
            CaptureMemoryFull: a limit leaves no room.
        """
        self.sweep()
        held = self.waiting_bytes(owner)
        if held + size > self.most_of_a_key or (not size and held >= self.most_of_a_key):
            raise CaptureMemoryFull(
                f"{held:,} bytes of your captures wait to be fetched, of at most {self.most_of_a_key:,}; DELETE those "
                f"that you do not need, or wait: each is removed after {self.time_to_live:.0f} s"
            )
        total = self.waiting_bytes()
        if total + size > self.most_bytes:
            raise CaptureMemoryFull(
                f"{total:,} bytes of captures wait on this server, of at most {self.most_bytes:,}; try again later"
            )

    def offer(self, content: bytes, owner: str) -> dict[str, Any]:
        """Store a capture file of an owner and schedule its expiry; return the fields that locate it in an answer.

        Raises:
            CaptureMemoryFull: a limit leaves no room for it.
        """
        capture = self.put(content, owner)
        asyncio.get_running_loop().call_later(self.time_to_live + 1, self.sweep)
        url, seconds = f"/v1/steercap/captures/{capture.name}", round(self.expires_in(capture), 1)
        return {"id": capture.name, "bytes": capture.size, "url": url, "expires_in": seconds}

    def waiting_bytes(self, owner: str | None = None) -> int:
        """Return the bytes of waiting captures, of one owner or (None) of all."""
        self.sweep()
        return sum(capture.size for capture in self._waiting.values() if owner is None or capture.owner == owner)

    def get(self, name: str, owner: str) -> WaitingCapture | None:
        """Return an owner's capture by id; None if there is none, or it is another owner's."""
        self.sweep()
        capture = self._waiting.get(name)
        return capture if capture is not None and secrets.compare_digest(capture.owner, owner) else None

    def remove(self, name: str, owner: str) -> bool:
        """Delete an owner's capture by id; return whether it existed."""
        if self.get(name, owner) is None:
            return False
        del self._waiting[name]
        return True

    def captures_of(self, owner: str) -> Iterator[WaitingCapture]:
        """Iterate over an owner's captures, in order of expiry."""
        self.sweep()
        return (capture for capture in tuple(self._waiting.values()) if capture.owner == owner)

    def expires_in(self, capture: WaitingCapture) -> float:
        """Return the seconds until a capture expires."""
        return max(0.0, capture.until - self._clock())

    def sweep(self) -> None:
        """Remove expired captures."""
        now = self._clock()
        while self._waiting:
            first = next(iter(self._waiting.values()))
            if first.until > now:
                return
            del self._waiting[first.name]


#: Default maximum bytes of files in the folder, in total and per API key.
MOST_BYTES: Final = 64 << 30
MOST_BYTES_OF_A_KEY: Final = 16 << 30
#: Error numbers of the file system that mean a lack of room.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_LOG: Final = logging.getLogger(__name__)


class CaptureFolder:
    """Folder that a server writes captures to; a context manager that seals its manifest at the end.

    Existing captures of the same model stay, and count against `most_bytes`.

    Args:
        path: path of the folder, created if missing.
        model: name of the model.
        most_bytes: maximum bytes of files in it.
        most_of_a_key: maximum bytes that one owner's requests may write while this server runs.

    Raises:
        RunDiffers: it holds captures of another model.
        InvalidFile: its manifest cannot be read.
        InvalidRequest: another process writes to it, or it holds captures that no manifest lists.
        OSError: it cannot be written.
    """

    def __init__(
        self, path: Path, *, model: str, most_bytes: int = MOST_BYTES, most_of_a_key: int = MOST_BYTES_OF_A_KEY
    ) -> None:
        self.most_bytes = most_bytes
        self.most_of_a_key = most_of_a_key
        self._run = CaptureRun(path, model=model)
        self._held = sum(request.bytes for request in self._run.requests.values())
        self._written: Counter[str] = Counter()
        self._turn = asyncio.Lock()
        self._writing = threading.Lock()
        self._closed = False

    def written(self, owner: str) -> int:
        """Return the bytes that an owner's requests have written to the folder since this server started."""
        return self._written[owner]

    def require_room(self, owner: str, size: int = 0) -> None:
        """Check that an owner may write `size` bytes more, 0 if the size is not known yet.

        Raises:
            CaptureMemoryFull: a limit leaves no room.
        """
        mine = self._written[owner]
        if mine + size > self.most_of_a_key or mine >= self.most_of_a_key:
            raise CaptureMemoryFull(
                f"your requests have written {mine:,} bytes to this server's folder, of at most "
                f"{self.most_of_a_key:,}; fetch rows instead, or ask its operator"
            )
        if self._held + size > self.most_bytes or self._held >= self.most_bytes:
            raise CaptureMemoryFull(
                f"this server's folder holds {self._held:,} bytes, of at most {self.most_bytes:,}; fetch rows instead, "
                "or ask its operator"
            )

    async def write(self, handles: Sequence[CaptureHandle], owner: str) -> list[ManifestRequest]:
        """Write the captures of a request to files, and list them in the manifest; requests are written one at a time.

        A file that was begun is finished even if the request is cancelled.

        Returns:
            The manifest's entry for each handle, in order.

        Raises:
            CaptureMemoryFull: a limit, or the disk, leaves no room.
            ServerFailure: the folder cannot be written for another reason.
        """
        async with self._turn:
            self.require_room(owner, sum(size_of(handle.as_saved()) for handle in handles))
            return [await finished(on_thread(partial(self._add, one, owner), "steercap folder")) for one in handles]

    def _add(self, handle: CaptureHandle, owner: str) -> ManifestRequest:
        try:
            with self._writing:
                if self._closed:
                    raise ServerFailure("this server is shutting down, and its folder is closed")
                request = self._run.add(handle)
        except OSError as error:  # which names the file: clients are not told of paths
            _LOG.exception("%s: a capture cannot be written", self._run.folder)
            full = error.errno in _FULL or error.errno is None  # safetensors gives no number
            reason = error.strerror or "its disk may be full"
            kind = CaptureMemoryFull if full else ServerFailure
            raise kind(
                f"this server's folder cannot be written: {reason}; fetch rows instead, or ask its operator"
            ) from error
        self._held += request.bytes
        self._written[owner] += request.bytes
        return request

    def close(self) -> None:
        """Seal the manifest once the file being written is finished; refuse later writes. Idempotent."""
        self._closed = True  # files that wait for their turn are refused
        with self._writing:
            self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
