"""Captured rows that wait at a server, as the origin of a handle's rows."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steercap.captures.handle import CaptureHandle
from steercap.captures.rows import Found
from steercap.client.connection import Connection
from steercap.concurrency.loops import each_of, scoped
from steercap.core.spec import Point
from steercap.errors import CaptureIncomplete, CaptureReleased, InvalidRequest, SteercapError

#: Maximum number of files downloaded at once.
_AT_ONCE: Final = 8


@dataclass(frozen=True)
class RemoteRows:
    """Rows of one capture that waits at a server.

    Args:
        connection: connection to the server.
        path: path of the file there.
        size: its size in bytes.
        request: the name of the request.
        points: points that it must hold.
        tokens: prompt and generated token ids of the request.
    """

    connection: Connection
    path: str
    size: int
    request: str
    points: tuple[Point, ...]
    tokens: tuple[int, ...]

    @property
    def place(self) -> object:
        return self.connection

    @property
    def again(self) -> None:
        return None

    def require_open(self) -> None:
        self.connection.here()

    async def collect(self, origins: Sequence[RemoteRows]) -> Sequence[Any]:
        return await self.connection.run(lambda: each_of(origins, _fetched, _AT_ONCE))

    def found(self, delivery: Any) -> Found:
        """Return the rows of a fetched file, checked to be that of this request; see `Origin.found`.

        Raises:
            CaptureIncomplete: it is not.
            CaptureReleased: the server has it no more.
        """
        if isinstance(delivery, SteercapError):
            raise delivery
        loaded: CaptureHandle = delivery
        read = (*loaded.prompt_token_ids, *loaded.output_token_ids)
        if (loaded.request_id, loaded.points, read) != (self.request, self.points, self.tokens):
            raise CaptureIncomplete(f"{self.request}: the server sent the capture of {loaded.request_id} instead")
        return loaded.lifecycle.require_here()

    def give_back(self) -> None:
        self.connection.let_go(self.path)

    def give_back_from_any_thread(self) -> None:
        self.connection.let_go(self.path)


async def _fetched(one: RemoteRows) -> CaptureHandle | SteercapError:
    """Download a capture file and load it; return the error of one that is gone, so that others still come."""
    with tempfile.TemporaryDirectory(prefix="steercap-fetch-") as folder:
        path = Path(folder, "rows.safetensors")
        try:
            written = await downloaded(one.connection, one.path, path)
        except InvalidRequest as error:  # 404
            return CaptureReleased(
                f"{one.request}: the server no longer has its rows ({error}). Fetch rows sooner, or keep them longer "
                "by `steercap serve --captures-seconds`"
            )
        if written != one.size:
            return CaptureIncomplete(f"{one.request}: {written:,} of {one.size:,} bytes came; fetch again")
        return await asyncio.to_thread(CaptureHandle.load, path)


async def downloaded(connection: Connection, address: str, path: Path) -> int:
    """Write a file of the server to a path, and return its size.

    Raises:
        The errors of `Connection.ask`.
    """

    async def download() -> int:
        with path.open("wb") as file:
            async with connection.answer("GET", address) as found:
                return sum([file.write(part) async for part in found.aiter_bytes()])

    return await scoped(download)
