"""Operator's folder for captures: a run of captures with a manifest, which `Manifest.load` reads.

File names are numbers that the run assigns: no client input becomes part of a path. A listed file is complete; a file
whose writing failed on a full disk is neither kept nor listed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from steercap.captures.files import Saved, named
from steercap.captures.handle import CaptureHandle
from steercap.captures.manifest import Request
from steercap.captures.saving import CaptureRun
from steercap.concurrency.loops import finished, on_thread
from steercap.errors import CaptureMemoryFull, ServerFailure

#: Maximum bytes of files in the folder, in total and per key.
MOST_BYTES: Final = 64 << 30
MOST_BYTES_OF_A_KEY: Final = 16 << 30
#: Errors that mean a lack of room.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_LOG: Final = logging.getLogger(__name__)


class CaptureFolder:
    """Folder that a server writes captures to; a context manager that seals its manifest.

    Existing captures of the same model stay, and count against `most_bytes`.

    Args:
        path: path of the folder, created if missing.
        model: name of the model.
        most_bytes: maximum bytes of files in it.
        most_of_a_key: maximum bytes that one key's requests may write while this server runs.

    Raises:
        RunDiffers: it holds a run of another model.
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
        """Return the bytes that requests of a key have written to the folder since this server started."""
        return self._written[owner]

    def require_room(self, owner: str, size: int = 0) -> None:
        """Check that a key may write more.

        Args:
            owner: owner of the request.
            size: bytes of its rows, as far as they are known.

        Raises:
            CaptureMemoryFull: a limit leaves no room.
        """
        mine = self._written[owner]
        if mine + size > self.most_of_a_key or mine >= self.most_of_a_key:
            raise CaptureMemoryFull(
                f"your requests have written {mine:,} bytes to this server's folder, and may write "
                f"{self.most_of_a_key:,}; fetch rows instead, or ask its operator"
            )
        if self._held + size > self.most_bytes or self._held >= self.most_bytes:
            raise CaptureMemoryFull(
                f"this server's folder holds {self._held:,} bytes, and {self.most_bytes:,} may be there; fetch rows "
                "instead, or ask its operator"
            )

    async def write(self, handles: Sequence[CaptureHandle], owner: str) -> list[Request]:
        """Write the captures of a request, and list them; one request at a time.

        A file that was begun is finished even if the request is cancelled.

        Args:
            handles: fetched handles.
            owner: their owner.

        Returns:
            The manifest's entry for each.

        Raises:
            CaptureMemoryFull: a limit, or the disk, leaves no room.
            ServerFailure: the folder cannot be written for another reason.
        """
        async with self._turn:
            self.require_room(owner, sum(_size(handle.as_saved()) for handle in handles))
            return [await finished(on_thread(partial(self._add, one, owner), "steercap folder")) for one in handles]

    def _add(self, handle: CaptureHandle, owner: str) -> Request:
        try:
            with self._writing:
                if self._closed:
                    raise ServerFailure("this server ends, and its folder is closed")
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
        """Seal the manifest, after the file that is being written. Idempotent."""
        self._closed = True  # files that wait for their turn are refused
        with self._writing:
            self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _size(saved: Saved) -> int:
    """Return the bytes of a capture's tensors; its file has a header too."""
    kept = [tensor for point, rows in saved.rows.items() for _, tensor in named(point, rows)]
    return sum(tensor.nbytes for tensor in kept)
