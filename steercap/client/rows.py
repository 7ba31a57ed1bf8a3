"""Captured rows and sketches that wait at a server: the source of a handle's rows, and a sketch that requests enter."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from steercap.captures.handle import CaptureHandle
from steercap.captures.rows import Found
from steercap.captures.sketch import Sketch
from steercap.client.asks import capture_json
from steercap.client.connection import Connection, RemoteServing
from steercap.concurrency.loops import each_of, scoped
from steercap.core.spec import CaptureSpec, Point
from steercap.engine.sketching import SketchRecord
from steercap.errors import (
    CaptureIncomplete,
    CaptureReleased,
    InvalidRequest,
    ModelClosed,
    ServerFailure,
    SketchIncomplete,
    SteercapError,
)
from steercap.requests.sketching import RunningSketch, record_of

#: Maximum number of files downloaded at once.
_AT_ONCE: Final = 8


@dataclass(frozen=True)
class RemoteRows:
    """Source of a capture handle's rows: one sample's file that waits at a server.

    Args:
        connection: connection to the server.
        path: URL path of the file.
        size: bytes of the file.
        request: id of the request that the file must name.
        points: points that the file must contain.
        tokens: prompt and generated token ids that the file must contain.
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
    def recompute(self) -> None:
        return None

    def require_open(self) -> None:
        self.connection.here()

    async def collect(self, origins: Sequence[RemoteRows]) -> Sequence[Any]:
        return await self.connection.run(lambda: each_of(origins, _fetched, _AT_ONCE))

    def checked(self, delivery: Any) -> Found:
        """Return the rows of a fetched file after checking that it is this request's; see `Origin.checked`.

        Raises:
            CaptureIncomplete: it is another request's, or incomplete.
            CaptureReleased: the server no longer has it.
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


async def _fetched(remote: RemoteRows) -> CaptureHandle | SteercapError:
    """Download a capture file and load it; an error of this file is returned, so that other downloads go on."""
    with tempfile.TemporaryDirectory(prefix="steercap-fetch-") as folder:
        path = Path(folder, "rows.safetensors")
        try:
            written = await downloaded(remote.connection, remote.path, path)
        except InvalidRequest as error:  # 404
            return CaptureReleased(
                f"{remote.request}: the server no longer has its rows ({error}). Fetch rows sooner, or keep them "
                "longer by `steercap serve --unfetched-seconds`"
            )
        if written != remote.size:
            return CaptureIncomplete(f"{remote.request}: {written:,} of {remote.size:,} bytes came; fetch again")
        return await asyncio.to_thread(CaptureHandle.load, path)


async def downloaded(connection: Connection, address: str, path: Path) -> int:
    """Download the server's file at URL path `address` to `path`, and return its number of bytes.

    Raises:
        The errors of `Connection.ask`.
    """

    async def download() -> int:
        with path.open("wb") as file:
            async with connection.answer("GET", address) as found:
                return sum([file.write(part) async for part in found.aiter_bytes()])

    return await scoped(download)


_PATH: Final = "/v1/steercap/sketches"


@dataclass(frozen=True)
class ServerSketch:
    """Statistics of one sketch at a server, from which `RunningSketch.fetch` reads.

    Args:
        connection: connection to the server.
        path: URL path of the sketch.
        turn: lock held while its file is downloaded: the server sends one at a time.
    """

    connection: Connection
    path: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def num_layers(self) -> int:
        return self.connection.opened().num_layers

    async def fetch(self, sketch: RunningSketch, points: Sequence[Point]) -> Sketch:
        counted = sketch.requests, sketch.rows
        numbers = ",".join(str(sketch.points.index(point)) for point in points)

        async def read() -> Sketch:
            with tempfile.TemporaryDirectory(prefix="steercap-sketch-") as folder:
                path = Path(folder, "it.safetensors")
                async with self.turn:
                    await downloaded(self.connection, f"{self.path}?points={numbers}", path)
                return await asyncio.to_thread(Sketch.load, path)

        found = await self.connection.run(read)
        asked = sketch.kind, sketch.size, tuple(points), sketch.tokens, sketch.spec.before_edits
        if (found.kind, found.size, found.points, found.tokens, found.before_edits) != asked:
            raise ServerFailure(f"{self.connection.url} sent {found!r} in place of {sketch!r}; please report this")
        if found.requests < counted[0] or found.rows < counted[1]:
            raise SketchIncomplete(
                f"{self.connection.url} sent a sketch of {found.rows} rows of {found.requests} requests, after it had "
                f"counted {counted[1]} of {counted[0]}; begin another one"
            )
        if sketch.record.unsure and found.requests > sketch.requests:
            raise SketchIncomplete(
                f"{self.connection.url} sent a sketch of {found.requests} requests, and {sketch.requests} ended here: "
                f"rows of {sketch.record.unsure} that failed or were cancelled on their way may have entered; begin "
                "another one"
            )
        return found

    async def close(self, record: SketchRecord) -> None:
        if not record.closed:
            record.closed = True
            await self.connection.run(lambda: self.connection.free(self.path))


async def open_sketch(connection: Connection, kind: str, size: Any, spec: CaptureSpec) -> RunningSketch:
    """Open a sketch (running statistics of captured rows) at a server; arguments as for `SteerModel.sketch`.

    Raises:
        UnknownName, InvalidSpec, PointNotArmed: an argument is wrong.
        PointSplit, SketchMemoryFull: as for a local model.
        ServerFailure: the server cannot be reached.
    """
    engine, record = RemoteServing(connection).here(), record_of("", kind, size, {})
    points = engine.compiler.captured(spec)[0]
    rows = {name: value for name, value in capture_json(spec, None).items() if name != "codec"}
    body = {"kind": kind, "size": record.size or None, **rows}
    said = await connection.run(lambda: connection.ask("POST", _PATH, json=body))
    with connection.answering():
        record.name, there = str(said["id"]), tuple(Point(*point) for point in said["points"])
    path = f"{_PATH}/{record.name}"
    connection.hold(path)
    if there != points:
        raise ServerFailure(f"{connection.url} sketches {', '.join(map(str, there))}; use one version on both sides")
    record.points = {point: number for number, point in enumerate(points)}
    return RunningSketch(record, spec, ServerSketch(connection, path))


@contextmanager
def entering(sketches: Sequence[RunningSketch]) -> Iterator[None]:
    """Count a request inside the block as `unsure` in these sketches if it fails without an answer of the server.

    Its rows may then have entered or not. An error that the server answers means that they did not, or that the server
    refuses the sketch from then on.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SteercapError) or isinstance(error, (ServerFailure, ModelClosed)):
            for sketch in sketches:
                sketch.record.unsure += 1
        raise


def count(sketches: Sequence[RunningSketch], results: Sequence[Mapping[str, Any]], url: str) -> None:
    """Update the counts of sketches by the results of a request that entered them.

    Args:
        sketches: the sketches.
        results: for each sample, its entry in the server's answer.
        url: address of the server, for messages.

    Raises:
        SketchIncomplete: the server does not confirm that the request has entered each of them.
    """
    for record in (sketch.record for sketch in sketches):
        said = [one.get("sketches", {}).get(record.name) for one in results]
        if not said or not all(said):
            raise SketchIncomplete(f"{url} does not confirm that the rows of this request entered the sketch")
        record.requests += len(said)
        record.rows = max(record.rows, *(one["rows"] for one in said))
