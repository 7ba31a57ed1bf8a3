"""Uploads of vectors and steering that are too large for a request's body: sent once, then named in requests."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from steercap.client.connection import Connection
from steercap.core.values import shown
from steercap.errors import InvalidSpec
from steercap.steering.directions import DirectionSet
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import SteeringSpec

#: Maximum number of uploads kept on the server while no request needs them.
_UNUSED: Final = 32
VECTORS: Final = "/v1/steercap/vectors"


@dataclass
class Upload:
    """One uploaded file.

    Args:
        name: name of the file on the server, unique to the connection and the content.
        users: number of running requests that need it.
        there: True if the server has it.
        turn: lock held during the upload.
    """

    name: str
    users: int = 0
    there: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Uploads:
    """Cache of the files that one connection has uploaded, by their content."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._kept: dict[str, Upload] = {}  # by digest, the last used last
        self._prefix = f"connection-{secrets.token_hex(6)}"
        self._numbers = count()

    @asynccontextmanager
    async def named(self, content: LayerVectors | DirectionSet | SteeringSpec) -> AsyncIterator[str]:
        """Upload content unless the server has it, and yield its name there; it is not deleted while the block runs.

        Raises:
            CaptureMemoryFull: the server has no more room for uploads of this API key.
            The errors of `Connection.ask`.
        """
        data = await asyncio.to_thread(encoded, content)
        digest = hashlib.sha256(data).hexdigest()
        one = self._kept.pop(digest, None) or Upload(f"{self._prefix}-{next(self._numbers)}-{digest[:24]}")
        self._kept[digest] = one
        one.users += 1
        try:
            async with one.turn:
                if not one.there:
                    self._connection.hold(f"{VECTORS}/{one.name}")  # the server may have it if this is cancelled
                    await self.put(one.name, data)
                    one.there = True
            yield one.name
        except InvalidSpec as error:
            # Somebody deleted it there, or the server is another one by now. There may be a new upload of it already.
            if one.name in str(error) and self._kept.get(digest) is one:
                del self._kept[digest]
            raise
        finally:
            one.users -= 1
            if not one.users and self._kept.get(digest) is not one:
                self._connection.let_go(f"{VECTORS}/{one.name}")
            self._drop_unused()

    async def put(self, name: str, data: bytes) -> Any:
        """Upload a file's bytes under a name, and return the server's description of it."""
        return await self._connection.ask("PUT", f"{VECTORS}/{name}", content=data)

    def _drop_unused(self) -> None:
        unused = [digest for digest, one in self._kept.items() if not one.users]
        for digest in unused[: max(0, len(unused) - _UNUSED)]:
            self._connection.let_go(f"{VECTORS}/{self._kept.pop(digest).name}")


def encoded(content: Any) -> bytes:
    """Return vectors, directions or steering as the bytes of their safetensors file.

    Raises:
        InvalidSpec: `content` is of another type.
    """
    if not isinstance(content, (LayerVectors, DirectionSet, SteeringSpec)):
        raise InvalidSpec(f"{shown(content)} cannot be uploaded; give LayerVectors, a DirectionSet or a SteeringSpec")
    with tempfile.TemporaryDirectory(prefix="steercap-upload-") as folder:
        return content.save(Path(folder, "it.safetensors")).read_bytes()
